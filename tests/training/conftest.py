"""A small corpus and a tokenizer trained on it, shared by the tests of the training data."""

import pytest
from tokenizers import Tokenizer

from qwen38_jax.training.bpe import save_tokenizer, train_tokenizer
from qwen38_jax.training.corpus import Corpus, load_corpus
from qwen38_jax.training.excerpts import Library, make_library

CODE_BYTES = 1_000_000


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return load_corpus(max_code_bytes=CODE_BYTES)


@pytest.fixture(scope="session")
def tokenizer(corpus) -> Tokenizer:
    return train_tokenizer(corpus.train)


@pytest.fixture(scope="session")
def tokenizer_dir(tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(tokenizer, directory, max_length=8192)
    return directory


@pytest.fixture(scope="session")
def library(corpus, tokenizer) -> Library:
    return make_library(corpus.train, tokenizer)
