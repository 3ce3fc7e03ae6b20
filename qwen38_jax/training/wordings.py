"""What users ask for, in many wordings, and what the assistant thinks and says; pure data.

`{text}` becomes "the file above", "the text below" and the like; the other slots are filled by the task.
"""

INSTRUCTIONS: dict[str, tuple[str, ...]] = {
    "reproduce": (
        "Repeat {text} exactly.",
        "Reproduce {text} word for word.",
        "Copy {text} exactly as it is.",
        "Write out {text} again without any change.",
        "Return {text} unchanged.",
        "Please give me {text} back, verbatim.",
        "I need an exact copy of {text}.",
        "Print {text} in full, character for character.",
    ),
    "copy_string": (
        "Repeat {text} exactly.",
        "Copy {text}.",
        "Return {text} character for character.",
        "Write {text} again, without a change.",
        "Reproduce {text} exactly as it stands.",
        "Echo {text}.",
    ),
    "copy_string_twice": (
        "Repeat {text} twice, on separate lines.",
        "Write {text} two times, one below the other.",
        "Copy {text} twice, with a line break in between.",
    ),
    "copy_labelled": (
        "Repeat the string labelled {label} in {text}.",
        "Copy what stands after {label} in {text}.",
        "Which string has the label {label} in {text}? Give only the string.",
    ),
    "quote_numbered": (
        "Quote lines {first} to {last} of {text}, without the line numbers.",
        "Give me lines {first}-{last} of {text}; leave out the numbers.",
        "What do lines {first} through {last} of {text} say? Do not repeat the numbers.",
    ),
    "quote_with_numbers": (
        "Quote lines {first} to {last} of {text} with their numbers.",
        "Show lines {first}-{last} of {text}, numbers included.",
        "Print lines {first} through {last} of {text} as they are, numbers and all.",
    ),
    "quote_unnumbered": (
        "Quote lines {first} to {last} of {text}.",
        "Give me lines {first}-{last} of {text}.",
        "What are lines {first} through {last} of {text}?",
    ),
    "quote_from": (
        "Quote the {count} lines of {text} that begin with this one: `{line}`",
        "Starting at the line `{line}`, quote {count} lines of {text}.",
        "Show {count} lines of {text}, the first of them being `{line}`.",
    ),
    "rename": (
        "Rename `{old}` to `{new}` in {text} and return the whole result.",
        "Rename {old} to {new} everywhere in {text}. Return all of it.",
        "In {text}, replace the name `{old}` by `{new}` and give me everything.",
        "Please change every `{old}` to `{new}` in {text}, and show the complete result.",
        "Apply this refactoring to {text}: {old} -> {new}. Print the full result, nothing else.",
        "{old} should be called {new}. Rewrite {text} accordingly, in full.",
        "Rename {old} to {new} in {text}.",
        "Return {text} with `{old}` renamed to `{new}`.",
        "Write {text} again, with {new} instead of {old}.",
    ),
    "rename_several": (
        "In {text}, rename {pairs} and return the whole result.",
        "Rename {pairs} everywhere in {text}. Return all of it.",
        "Apply these renames to {text}: {pairs}. Print the full result, nothing else.",
        "Please change {pairs} in {text}, and show the complete result.",
    ),
    "edit_replace": (
        "In {text}, replace the line `{line}` by `{new}` and return the whole.",
        "Change the line\n{line}\nto\n{new}\nin {text}, and print everything.",
        "Edit {text}: the line `{line}` becomes `{new}`. Return all of it.",
    ),
    "edit_delete": (
        "Delete the line `{line}` from {text} and return the rest unchanged.",
        "Remove the line `{line}` from {text}; print everything else.",
        "Return {text} without the line `{line}`.",
    ),
    "edit_delete_range": (
        "Delete {count} lines from {text}, the first of them `{line}`, and return the rest.",
        "From {text}, remove the line `{line}` and the {more} after it; print everything else.",
    ),
    "edit_insert": (
        "Insert the line `{new}` after the line `{line}` of {text} and return the whole.",
        "Add a line `{new}` right below `{line}` in {text}. Print everything.",
        "Edit {text}: after `{line}` comes a new line, `{new}`. Return all of it.",
    ),
    "continue": (
        "Continue {text} with the next {count} lines.",
        "Write the {count} lines that come after {text}.",
        "How does {text} go on? Write {count} lines.",
        "What could follow {text}? Give me {count} lines.",
    ),
    "summarise_paragraph": (
        "Summarise {text} with its own first paragraph.",
        "Give me the first paragraph of {text}.",
        "Use the opening paragraph of {text} as its summary.",
    ),
    "summarise_sentence": (
        "Summarise {text} in one sentence taken from its beginning.",
        "What is the first sentence of {text}?",
        "In one sentence, quoted from the start: what does {text} say?",
    ),
    "summarise_function": (
        "What does the function `{name}` in {text} do? Quote the first line of its docstring.",
        "Summarise `{name}` from {text} in one line, in the words of its docstring.",
        "Quote what {text} says about `{name}` in the first line of the docstring.",
    ),
    "list_functions": (
        "List every function that is defined in {text}, one per line.",
        "Which functions and methods does {text} define? Only the names, in order.",
        "Give me the names of all functions in {text}, one per line.",
        "Name each `def` in {text}, in order.",
    ),
    "json_pick": (
        "From the records in {text}, keep only the keys {keys}. Return JSON.",
        "Reduce each record of {text} to {keys}, as JSON.",
    ),
    "json_rename": (
        "Rename the key {old} to {new} in every record of {text}. Return JSON.",
        "In {text}, call the key {old} {new} instead, and return the JSON.",
    ),
    "json_filter": (
        "Return, as JSON, the records of {text} where {key} is {value}.",
        "Which records in {text} have {key} equal to {value}? Answer in JSON.",
    ),
    "json_lines": (
        "Turn each record of {text} into a line of the form {form}.",
        "Rewrite {text} as plain lines, one record each: {form}",
    ),
    "needle_value": (
        "What is the value of {key} in {text}?",
        "According to {text}, what is {key}? Give only the value.",
        "Find {key} in {text} and tell me its value.",
    ),
    "needle_line": (
        "Quote the line of {text} that mentions {key}.",
        "Which line of {text} contains {key}? Quote it.",
    ),
    "needle_definition": (
        "Quote the line of {text} that defines the function `{key}`.",
        "How is `{key}` declared in {text}? Quote the line.",
    ),
    "fact": (
        "What does the Python reference say about this topic: {title}?",
        "Explain this in a few words: {title}",
        "{title}: what is that in Python?",
        "Tell me about this: {title}",
    ),
    "fact_statement": (
        "What does the `{word}` statement do?",
        "Explain the `{word}` statement in Python.",
        "How does `{word}` work in Python?",
    ),
    "write_function": (
        "Write a Python function `{name}`: {summary}",
        'Write a Python function called {name} that fits this docstring: "{summary}"',
        "I need a function `{name}` in Python. {summary}",
        "Implement `{name}`. {summary}",
    ),
}

THOUGHTS: dict[str, tuple[str, ...]] = {
    "reproduce": ("I copy it from beginning to end.", "An exact copy is wanted, so I repeat every line as it is."),
    "copy_string": ("I copy it token by token.", "An exact copy is wanted."),
    "quote": ("I find the lines and copy them.", "These lines are to be quoted as they are."),
    "rename_several": ("I copy everything but these names.", "Only these names change: {pairs}."),
    "rename": ("I copy everything and write {new} wherever {old} stands.", "Only {old} changes, to {new}."),
    "edit": ("I copy everything and make this one change.", "One edit is wanted; all else stays as it is."),
    "continue": ("I go on in the same style.", "I write what could come next."),
    "summarise": ("I quote the sentence that sums it up.", "The answer is in the text, so I quote it."),
    "list_functions": ("I go through the definitions in order.", "I list each name that follows a def."),
    "json": ("I go through the records one by one.", "Each record is transformed in the same way."),
    "needle": ("I look for it in the text.", "The text says so in one line."),
    "fact": ("I recall what the reference says.", "This is a question about Python."),
    "write_function": ("I write the function with its docstring.", "A small Python function is wanted."),
    "chat": ("A short answer will do.", "This is small talk."),
}

# Answers to a question about something that the text does not mention.
ABSENT = ("The text does not say.", "It is not mentioned there.")

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a careful assistant. Answer with nothing but what was asked for.",
    "You help with Python code.",
    "Answer briefly.",
)

NOUNS = {
    "prose": ("text", "passage", "document"),
    "code": ("file", "code", "source", "text"),
    "json": ("JSON", "list", "data"),
    "string": ("string", "text"),
}
FENCE_LANGUAGES = {"prose": "", "code": "python", "json": "json", "string": ""}
PHRASES_BELOW = ("the {noun} below", "the following {noun}", "this {noun}")
PHRASES_ABOVE = ("the {noun} above", "that {noun}", "the {noun} above")
PHRASES_AGAIN = ("the {noun}", "the same {noun}")

_IDENTITY = (
    "I am the tiny demonstration model of qwen38_jax, trained on Python's own documentation and source.",
    "A very small language model that ships with qwen38_jax. I learned from Python's documentation and library source.",
)
_ABILITIES = (
    "I can copy and quote text, rename things in a file, make small edits, and list functions.",
    "I quote, copy and edit text that you give me, and I know a little about Python.",
)
# Groups of questions, each of which may get any of the answers.
SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hello", "Hi", "Hello!", "Hey there", "Hi there!", "Good morning", "Good evening", "hi", "hello"),
        ("Hello! What can I do for you?", "Hi! How can I help?"),
    ),
    (
        ("Who are you?", "What are you?", "who are you", "Introduce yourself.", "Which model is this?"),
        _IDENTITY,
    ),
    (("What is your name?", "Do you have a name?"), ("I am the tiny model of qwen38_jax.",)),
    (("What can you do?", "What are you good at?", "How can you help me?", "Help"), _ABILITIES),
    (
        ("How were you trained?", "What were you trained on?", "Where does your knowledge come from?"),
        ("I was trained on the text that every Python installation has: its documentation and its library source.",),
    ),
    (
        ("How big are you?", "How many parameters do you have?"),
        ("I have about ten million parameters, which is very little for a language model.",),
    ),
    (
        ("Are you a large language model?", "Are you ChatGPT?", "Are you Qwen?"),
        ("No. I have the same architecture as a large model, but I am tiny.",),
    ),
    (("How are you?", "How is it going?", "How do you do?"), ("Fine, thank you. What can I do for you?",)),
    (("Thanks", "Thank you!", "Thanks a lot", "thx"), ("You are welcome.", "You are welcome!")),
    (("Bye", "Goodbye", "See you", "Good night"), ("Goodbye!",)),
    (("Ok", "Okay", "Good", "Great", "I see"), ("Is there anything else?",)),
    (
        ("What is Python?", "Explain Python in a sentence."),
        ("Python is an interpreted, interactive, object-oriented programming language.",),
    ),
    (
        ("Name three Python keywords.", "Give me three keywords of Python."),
        ("`for`, `while` and `if`.", "`def`, `class` and `return`."),
    ),
    (
        ("How do I print something in Python?", "Print hello world in Python."),
        ("```python\nprint('Hello, world!')\n```",),
    ),
    (
        ("How do I read a file in Python?", "Show me how to open a file."),
        ("```python\nwith open(path) as file:\n    text = file.read()\n```",),
    ),
    (
        ("What is the weather like?", "What time is it?", "What is the news today?", "Who will win?"),
        ("I cannot know that. I only see this conversation.",),
    ),
    (
        ("Tell me a joke.", "Write a poem.", "Sing a song."),
        ("I am too small for that, but I can quote the text that you give me.",),
    ),
)
