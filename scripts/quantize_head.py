"""Quantises the output head with GPTQ, calibrated on hidden rows that the model itself produced.

    python -m scripts.quantize_head --bits 4 8 --group 64 128       # compares, for the checkpoint that ships
    python -m scripts.quantize_head --checkpoint DIR --weights trained --calibration prompts.jsonl --out DST

The model answers prompts, and the rows from which it chose its answers' tokens are what the head is calibrated on: the
rows that it reads in use. On other prompts, held out, the head is then compared with the exact one, beside a head that
was rounded to nearest. One record of each goes to experiments/results/quantize_head.jsonl.

By default the prompts are tasks about documents of this Python installation, held out by document. A file has one
prompt a line, an object with prompt, messages or prompt_ids; a line that has its "output" (text) too is taken as
answered. Every fifth line is held out.

KL divergences of a few thousand rows are known to some 5 %: a few uncertain rows make up most of them.
"""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import tokenizers

from experiments.harness import WEIGHTS, append, new_record, table
from qwen38_jax.checkpoint import export_checkpoint, load_checkpoint, loaded_bytes
from qwen38_jax.checkpoint.write import require_new
from qwen38_jax.engine import Engine, Request
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.engine.memory import NotEnoughMemory, device_budget
from qwen38_jax.evaluation.head import compare_heads
from qwen38_jax.evaluation.hidden import CHUNK, hidden_chunks
from qwen38_jax.quantization import QuantTensor, is_quantised, quantize
from qwen38_jax.quantization.gptq import Hessian, add_rows, empty_hessian, gptq, map_rows
from qwen38_jax.training.corpus import Corpus, Document, load_corpus
from qwen38_jax.training.dataset import held_out_tasks

Array = jax.Array

QUESTION = "quantize_head"
COLUMNS = (
    "method",
    "bits",
    "group",
    "clip_search=clipped",
    "output_error=output error",
    "kl=KL, nats",
    "top1_agreement=same top token",
    "calibration_rows=calibrated on",
    "held_out_rows=rows compared",
)
HELD_OUT_SHARE = 5  # one prompt in so many, and one row
NEW_TOKENS = 256  # of an answer
BATCH = 8  # prompts answered together
CORPUS_BYTES = 2_000_000
TASK_TOKENS = (128, 768)  # of prompt and answer


class Prompt(NamedTuple):
    """A request, and its answer's ids where that is known."""

    request: Request
    answer: tuple[int, ...] | None = None


class Text(NamedTuple):
    """Token ids, of which those from `start` on are the model's answer."""

    ids: tuple[int, ...]
    start: int


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to quantise; see `gptq`."""

    bits: int
    group: int | None
    symmetric: bool
    act_order: bool
    clip_search: bool
    damping: float


# ---- prompts ----


def default_prompts(checkpoint: Path, tokens: int) -> tuple[list[Prompt], list[Prompt]]:
    """Tasks about documents, for calibration and, about other documents, held out; enough for so many tokens."""
    corpus = load_corpus(CORPUS_BYTES)
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def prompts(documents: tuple[Document, ...]) -> list[Prompt]:
        of_each = 2 + tokens // 300
        tasks = held_out_tasks(Corpus((), documents), tokenizer, per_task=of_each, total_tokens=TASK_TOKENS)
        in_turn = itertools.chain.from_iterable(tasks[i::of_each] for i in range(of_each))
        return [Prompt(Request(messages=task.messages, thinking=task.thinking)) for task in in_turn]

    return prompts(corpus.train), prompts(corpus.held_out)


def file_prompts(path: Path, engine: Engine) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts of a file of JSON lines, for calibration and held out."""
    prompts = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    prompts.append(_prompt(json.loads(line), engine))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{path}:{number}: {error}") from None
    if len(prompts) < HELD_OUT_SHARE:
        raise ValueError(f"{path} has {len(prompts)} prompts; some must be held out, so at least {HELD_OUT_SHARE}")
    held_out = prompts[HELD_OUT_SHARE - 1 :: HELD_OUT_SHARE]
    del prompts[HELD_OUT_SHARE - 1 :: HELD_OUT_SHARE]
    return prompts, held_out


def _prompt(record: Any, engine: Engine) -> Prompt:
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    request = Request(**{name: record[name] for name in ("prompt", "messages", "prompt_ids") if name in record})
    asked = len(engine.encode(request))
    if "output" not in record:
        return Prompt(request)
    if not isinstance(record["output"], str):
        raise ValueError(f"output must be a string, got {type(record['output']).__name__}")
    known = tuple(engine.tokenizer.encode(record["output"], parse_special=True))
    if asked + len(known) > engine.cfg.max_position_embeddings:
        raise ValueError(
            f"prompt and output have {asked + len(known)} tokens; the model's context is "
            f"{engine.cfg.max_position_embeddings}"
        )
    return Prompt(request, known)


# ---- hidden rows ----


def answer(engine: Engine, prompts: Iterable[Prompt], tokens: int) -> list[Text]:
    """Prompts with their answers, as many as together have so many tokens of answers, or all there are."""
    texts, missing, prompts = [], tokens, iter(prompts)
    while missing > 0 and (batch := list(itertools.islice(prompts, BATCH))):
        for text in _answer_batch(engine, batch):
            texts.append(text)
            missing -= len(text.ids) - text.start
    if missing == tokens:
        raise ValueError(
            f"the answers to {len(texts)} prompts are empty: there are no rows to learn from or to compare"
        )
    return texts


def _answer_batch(engine: Engine, prompts: list[Prompt]) -> Iterator[Text]:
    sampling = engine.sampling(max_new_tokens=NEW_TOKENS, seed=0)
    ids = [tuple(engine.encode(prompt.request)) for prompt in prompts]
    asked = [i for i, prompt in enumerate(prompts) if prompt.answer is None]
    completions = engine.generate([Request(prompt_ids=ids[i], sampling=sampling) for i in asked])
    answers = {i: completion.token_ids for i, completion in zip(asked, completions, strict=True)}
    for i, prompt in enumerate(prompts):
        yield Text(ids[i] + answers.get(i, prompt.answer), len(ids[i]))


def answer_rows(engine: Engine, text: Text) -> Iterator[tuple[Array, Array]]:
    """Hidden rows `[R, H]`, and which of them `[R]` chose a token of the answer."""
    chunks = hidden_chunks(engine.params, engine.cfg, text.ids[:-1])  # the last token chooses nothing
    for number, hidden in enumerate(chunks):
        row = number * CHUNK + jnp.arange(CHUNK)
        yield hidden, (row >= text.start - 1) & (row < len(text.ids) - 1)


def calibrate(engine: Engine, texts: Iterable[Text]) -> Hessian:
    """The second moment of the rows from which the answers' tokens were chosen."""
    hessian = empty_hessian(engine.cfg.hidden_size)
    for number, text in enumerate(texts, start=1):
        try:
            for hidden, valid in answer_rows(engine, text):
                hessian = add_rows(hessian, hidden, valid)
        except ValueError as error:
            beginning = engine.tokenizer.decode(text.ids[:30], skip_special=False)
            raise ValueError(f"text {number}, which begins {beginning!r}: {error}") from None
    return hessian


def collect(engine: Engine, texts: Iterable[Text]) -> Array:
    """These rows themselves, `[rows, H]`."""
    return jnp.concatenate([hidden[valid] for text in texts for hidden, valid in answer_rows(engine, text)])


# ---- the head ----


def quantise_both(head: Array, hessian: Hessian, settings: Settings) -> dict[str, QuantTensor]:
    """The head rounded to nearest ("rtn") and by GPTQ ("gptq")."""

    @jax.jit
    def nearest(w):
        return quantize(w, settings.bits, settings.group, symmetric=settings.symmetric)

    quantised, _ = gptq(head, hessian.matrix, **dataclasses.asdict(settings))
    return {"rtn": map_rows(nearest, head, head.shape[1]), "gptq": quantised}


def compare(
    engine: Engine, heads: dict[str, QuantTensor], hidden: Array, settings: dict[str, Any], **about: Any
) -> list[dict[str, Any]]:
    """One record a head: how it was made, and how far it is from the exact one on held-out rows `[rows, H]`."""
    made = []
    for method, head in heads.items():
        difference = compare_heads(engine.params.lm_head, head, hidden, real_vocab_size=engine.tokenizer.vocab_size)
        results = {**dataclasses.asdict(difference), "head_bytes": head.nbytes}
        not_used = dict.fromkeys(("act_order", "clip_search", "damping")) if method == "rtn" else {}
        described = {"method": method, **settings, **not_used}
        made.append(new_record(QUESTION, settings=described, results=results, **about))
    return made


def write(checkpoint: Path, head: QuantTensor, destination: Path) -> None:
    """Writes the checkpoint, in its own dtype, with the quantised head in place of its own."""
    source = load_checkpoint(checkpoint)
    export_checkpoint(
        destination,
        source.params.replace(lm_head=head.astype(source.cfg.dtype)),
        source.cfg,
        draft_head=source.draft_head,
        hf_config=source.hf_config,
        generation_config=source.generation_config,
        prefix=source.prefix,
        copy_from=checkpoint,
    )


def require_room(checkpoint: Path) -> None:
    """Raises NotEnoughMemory if the checkpoint cannot be loaded as `write` does."""
    nbytes, budget = loaded_bytes(checkpoint), device_budget()
    if budget is not None and nbytes > budget.nbytes:
        raise NotEnoughMemory(
            f"to write {checkpoint} with another head takes {nbytes / 2**30:.2f} GiB, but {budget.source} leaves "
            f"{budget.nbytes / 2**30:.2f} GiB: free memory, or leave out --out"
        )


def check(engine: Engine, checkpoint: Path, choices: Sequence[Settings]) -> None:
    """Raises ValueError for what would fail after the long part."""
    head = engine.params.lm_head
    if head is None:
        raise ValueError(f"{checkpoint} has no head of its own: its embedding is the head (tie_word_embeddings)")
    if is_quantised(head):
        raise ValueError(f"the head of {checkpoint} is in integers already: take a checkpoint that has it in floats")
    row = jax.ShapeDtypeStruct((1, head.shape[1]), head.dtype)
    for settings in choices:
        jax.eval_shape(lambda w, s=settings: quantize(w, s.bits, s.group), row)


def run(
    checkpoint: Path,
    choices: Sequence[Settings],
    calibration: Path | None,
    tokens: int,
    *,
    weights: str,
    dtype: str | None,
) -> tuple[list[dict[str, Any]], QuantTensor]:
    """Quantises and compares in every way chosen. Returns the records, and the head by GPTQ of the last choice."""
    engine = Engine.from_checkpoint(checkpoint, dtype=dtype, max_batch=BATCH)
    check(engine, checkpoint, choices)
    if calibration is None:
        prompts, held_out = default_prompts(checkpoint, tokens)
    else:
        prompts, held_out = file_prompts(calibration, engine)
    hessian = calibrate(engine, answer(engine, prompts, tokens))
    texts = answer(engine, held_out, max(1, tokens // HELD_OUT_SHARE))
    hidden = collect(engine, texts)
    shared = {
        "checkpoint": checkpoint.name,
        "dtype": engine.cfg.dtype,
        "calibration": "default" if calibration is None else calibration.name,
        "calibration_rows": int(hessian.rows),
        "held_out_rows": len(hidden),
    }
    made = []
    for settings in choices:
        heads = quantise_both(engine.params.lm_head, hessian, settings)
        questions = [text.ids[: text.start] for text in texts]
        about = {"weights": weights, "prompts": questions}
        made += compare(engine, heads, hidden, {**dataclasses.asdict(settings), **shared}, **about)
    return made, heads["gptq"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="default: the one that ships")
    parser.add_argument("--weights", choices=WEIGHTS, help="what the checkpoint holds; needed with --checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU")
    parser.add_argument("--bits", type=int, nargs="+", choices=(4, 8), default=[4], help="default: 4")
    parser.add_argument("--group", type=int, nargs="+", default=[128], metavar="N", help="default: 128 columns a scale")
    parser.add_argument("--asymmetric", action="store_true", help="zero points beside the scales")
    parser.add_argument("--act-order", action="store_true", help="columns of largest inputs first")
    parser.add_argument(
        "--clip-search",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="try smaller ranges for every group (default: yes, it lowers the KL divergence)",
    )
    parser.add_argument("--damping", type=float, default=0.01, metavar="X", help="of the diagonal's mean (%(default)s)")
    parser.add_argument("--calibration", default="default", metavar="FILE.jsonl", help="prompts (default: tasks)")
    parser.add_argument("--tokens", type=int, default=16384, metavar="N", help="of answers (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the text model with the new head there")
    args = parser.parse_args(argv)
    if (args.checkpoint is None) != (args.weights is None):
        parser.error("--checkpoint and --weights go together: the checkpoint that ships is trained")
    choices = [
        Settings(bits, group, not args.asymmetric, args.act_order, args.clip_search, args.damping)
        for bits, group in itertools.product(args.bits, args.group)
    ]
    if args.tokens < 1:
        parser.error("--tokens must be at least 1")
    if args.out and len(choices) > 1:
        parser.error("--out writes one head: give one value of --bits and one of --group")
    checkpoint = args.checkpoint or SHIPPED_CHECKPOINT
    calibration = None if args.calibration == "default" else Path(args.calibration)
    weights = args.weights or "trained"
    try:
        if args.out:
            require_new(args.out)
            require_room(checkpoint)
        made, head = run(checkpoint, choices, calibration, args.tokens, weights=weights, dtype=args.dtype)
        for record in made:
            append(record)
        print(table(made, COLUMNS))
        if args.out:
            write(checkpoint, head, args.out)
            print(f"wrote {args.out}")
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
