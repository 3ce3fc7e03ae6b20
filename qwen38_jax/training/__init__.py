"""Training of the small checkpoint that ships: corpus, tokenizer, tasks and packed data sets."""
