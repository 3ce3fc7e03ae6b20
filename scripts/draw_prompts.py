"""Draws prompts for the lab from this Python installation: chat tasks, Python, prose, texts to be reproduced.

    python -m scripts.draw_prompts train.jsonl held_out.jsonl --count 4000 --held-out 200

Prompts of the first file are about documents that the shipped checkpoint was trained on, those of the second about
documents that it was not. `source` is the kind of a prompt. Users' own questions serve as well:
qwen38_jax/lab/README.md says what a line holds.
"""

import argparse
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.evaluation.held_out import (
    REPRODUCE,
    documents_of,
    draw_documents,
    function_starts,
    plain_starts,
)
from qwen38_jax.training.corpus import Corpus, Document, load_corpus
from qwen38_jax.training.dataset import LineEncoder, held_out_tasks, load_tokenizer
from scripts.measure_tiny import TRAINING_RUN, held_out_by

TASK_TOKENS = (96, 700)  # of question and answer
REPRODUCED_TOKENS = (60, 420)
MODULE_TOKENS = 500  # above the function to be continued
PROSE_TOKENS = 128
NEW_TOKENS = {"code": 256, "prose": 192}
SHARES = {"chat": 0.5, "reproduce": 0.2, "code": 0.2, "prose": 0.1}


def draw(documents: Sequence[Document], backend: tokenizers.Tokenizer, count: int, seed: int) -> list[dict[str, Any]]:
    """About `count` prompts in a drawn order; fewer where the documents have no more of a kind."""
    encode, rng = LineEncoder(backend), random.Random(seed)
    wanted = {kind: round(share * count) for kind, share in SHARES.items()}
    chats = _chats(documents, backend, wanted["chat"], seed)
    excerpts = draw_documents(documents, encode, wanted["reproduce"], *REPRODUCED_TOKENS, rng)
    functions = function_starts(documents, encode, wanted["code"], MODULE_TOKENS, rng)
    prose = plain_starts(documents, encode, "prose", PROSE_TOKENS)[: wanted["prose"]]
    plain = [("code", f.prompt) for f in functions] + [("prose", text) for text in prose]
    drawn = [
        *rng.sample(chats, min(len(chats), wanted["chat"])),
        *(_ask(f"{REPRODUCE}\n\n{excerpt.text}", "reproduce") for excerpt in excerpts),
        *({"prompt": text, "source": kind, "max_new_tokens": NEW_TOKENS[kind]} for kind, text in plain),
    ]
    rng.shuffle(drawn)
    return drawn


def _chats(documents: Sequence[Document], backend: tokenizers.Tokenizer, count: int, seed: int) -> list[dict[str, Any]]:
    """At least `count` questions of every family of tasks in equal parts."""
    corpus, families = Corpus((), tuple(documents)), 10
    tasks = held_out_tasks(corpus, backend, per_task=1 + count // families, total_tokens=TASK_TOKENS, seed=seed)
    return [{"messages": list(t.messages), "thinking": t.thinking, "source": f"chat/{t.task}"} for t in tasks]


def _ask(message: str, source: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": message}], "thinking": False, "source": source}


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    os.replace(partial, path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("train", type=Path, metavar="TRAIN.jsonl")
    add("held_out", type=Path, metavar="HELD_OUT.jsonl")
    add("--count", type=int, default=200, metavar="N", help="prompts of the first file (%(default)s)")
    add("--held-out", type=int, default=50, metavar="N", dest="held_out_count", help="of the second (%(default)s)")
    add("--checkpoint", type=Path, metavar="DIR", default=SHIPPED_CHECKPOINT, help="for its tokenizer")
    add("--stdlib", type=Path, metavar="DIR", help="library directory of another Python installation")
    add("--max-code-bytes", type=int, metavar="N", help="take only so much of the library, to be quicker")
    add("--seed", type=int, default=0, metavar="N")
    args = parser.parse_args(argv)
    try:
        corpus, backend = load_corpus(args.max_code_bytes, root=args.stdlib), load_tokenizer(args.checkpoint)
        write_lines(args.train, draw(corpus.train, backend, args.count, args.seed))
        held_out = documents_of(corpus.held_out, held_out_by(TRAINING_RUN))
        write_lines(args.held_out, draw(held_out, backend, args.held_out_count, args.seed))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
