"""The corpus of the running interpreter, and the tokenizer trained on it."""

import ast
import shutil
import sysconfig
from pathlib import Path

import pytest

from qwen38_jax.training import corpus as corpus_module
from qwen38_jax.training.bpe import ADDED_STRINGS, VOCAB_SIZE, train_tokenizer
from qwen38_jax.training.corpus import Document, load_corpus

CODE_BYTES = 1_000_000  # as the corpus fixture


def test_split_is_by_group(corpus):
    train, held_out = ({d.group for d in docs} for docs in (corpus.train, corpus.held_out))
    assert train and held_out
    assert train.isdisjoint(held_out)
    held_out_share = len(held_out) / len(train | held_out)
    assert 0.005 < held_out_share < 0.12
    names = [d.name for d in corpus.train + corpus.held_out]
    assert len(names) == len(set(names))
    assert list(corpus.train) == sorted(corpus.train, key=lambda d: d.name)


def test_counts_add_up(corpus):
    documents = corpus.train + corpus.held_out
    assert sum(c["documents"] for c in corpus.counts.values()) == len(documents)
    assert sum(c["characters"] for c in corpus.counts.values()) == sum(len(d.text) for d in documents)
    assert {d.name.partition(":")[0] for d in documents} == {"topic", "docstrings", "code"}


def test_documents_are_clean_and_analysed(corpus):
    for document in corpus.train + corpus.held_out:
        text = document.text
        assert text == text.strip() and "\r" not in text and "<|" not in text
        if document.kind == "prose":
            assert document.functions == document.identifiers == ()
            continue
        ast.parse(text)
        for function in document.functions:
            line = text[function.start :].partition("\n")[0].strip()
            assert line.removeprefix("async").strip().startswith(f"def {function.name}"), document.name
            assert text[function.end : function.end + 1] in ("\n", "")
        assert all(i in text for i in document.identifiers)


def test_loading_is_deterministic_and_a_larger_limit_keeps_the_files(corpus, monkeypatch):
    assert load_corpus(max_code_bytes=CODE_BYTES) == corpus
    monkeypatch.setattr(corpus_module, "MIN_BYTES", 10_000)
    smaller = load_corpus(max_code_bytes=CODE_BYTES // 2)
    names = [{d.name for d in c.train + c.held_out} for c in (smaller, corpus)]
    assert names[0] < names[1]


def test_another_installation_without_reference_topics(monkeypatch, tmp_path):
    """As a distribution that strips the module."""
    monkeypatch.setattr(corpus_module, "MIN_BYTES", 10_000)
    for package in ("asyncio", "email", "json", "logging"):
        shutil.copytree(Path(sysconfig.get_path("stdlib")) / package, tmp_path / package)
    kinds = {d.name.partition(":")[0] for d in load_corpus(root=tmp_path).train}
    assert kinds == {"docstrings", "code"}


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match=r"found only [\d,]+ characters"):
        load_corpus(max_code_bytes=10_000)


def test_files_that_are_no_text_are_skipped(tmp_path):
    body = "def f():\n    return 'a plain function body'\n" * 10
    files = {
        "good.py": body.encode(),
        "latin1.py": ("# caf\xe9\n" + body).encode("latin-1"),
        "broken.py": (body + "def (:\n").encode(),
        "table.py": (body + f"x = {list(range(2000))}").encode(),
        "special.py": (body + "x = '<|im_end|>'\n").encode(),
    }
    kept = []
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        kept += corpus_module._documents_of_file(tmp_path / name, name)
    assert [d.name for d in kept] == ["code:good.py"]


def test_docstring_document_is_prose_in_source_order():
    source = '"""About it."""\nclass A:\n    """An A."""\n    def f(self, x=1):\n        """Does f."""\n'
    text = corpus_module._docstrings("pkg/__init__.py", ast.parse(source))
    assert text == "Module pkg\n\nAbout it.\n\nclass A\n\nAn A.\n\nA.f(self, x=1)\n\nDoes f."


def test_near_duplicates_are_not_held_out():
    def text(seed):
        return "\n".join(f"a line that is telling enough, number {i} of text {seed}" for i in range(20))

    held_out = [n for i in range(400) if corpus_module._digest(n := f"file{i}.py", "split") % 1000 < 40]
    kept = [n for i in range(400) if (n := f"file{i}.py") not in held_out]
    unique = [Document(f"code:{name}", "code", text(name)) for name in held_out[1:] + kept]
    copy = Document(f"code:{held_out[0]}", "code", text(kept[0]) + "\nwith one more line that nobody else has")
    corpus = corpus_module._split([*unique, copy])
    assert {d.group for d in corpus.held_out} == set(held_out[1:])
    assert copy in corpus.train


def test_vocabulary_ends_with_qwens_added_strings(tokenizer):
    assert tokenizer.get_vocab_size() == VOCAB_SIZE == 8192
    first = VOCAB_SIZE - len(ADDED_STRINGS)
    assert [tokenizer.token_to_id(s) for s in ADDED_STRINGS] == list(range(first, VOCAB_SIZE))
    # Qwen3.8 tokenizer_config: special for 248044-248057 and 248070-248076.
    special = [tokenizer.get_added_tokens_decoder()[first + i].special for i in range(len(ADDED_STRINGS))]
    assert special == [i < 14 or i >= 26 for i in range(33)]


def test_tokenizer_is_deterministic_and_lossless(corpus, tokenizer):
    assert train_tokenizer(corpus.train).to_str() == tokenizer.to_str()
    for text in [
        *(d.text for d in corpus.held_out[:5]),
        "  \n\n\t x\u200b 12345 \U0001f469\u200d\U0001f680 日本 \x00\n ",
    ]:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids  # NFC
    assert len(tokenizer.encode("2024").ids) == 4  # digits one by one, as Qwen's split regex has it


def test_too_few_merges_are_refused():
    with pytest.raises(ValueError, match="byte-pair tokens: train on more documents"):
        train_tokenizer([Document("topic:a", "prose", "hello world")])


def test_transformers_loads_the_tokenizer(tokenizer, tokenizer_dir):
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    text = "def f(x):\n    return x <think>\n\n</think>\n\n<|im_end|>"
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    assert (loaded.eos_token, loaded.pad_token, loaded.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    assert loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True) == text.removesuffix("<|im_end|>")
    rendered = loaded.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
