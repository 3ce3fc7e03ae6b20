"""The command `qwen38`. What is heavy is imported by the verb that needs it."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from qwen38_jax import __version__
from qwen38_jax.config import KERNELS
from qwen38_jax.spec_config import MODES


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb. Returns 0; 1 after an error, which is told on stderr."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains as it closes
        return 1
    except (ValueError, OSError) as error:
        print(f"qwen38: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qwen38", description="Qwen3.8 in functional JAX.")
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _add_generate(verbs.add_parser("generate", help="answer prompts"))
    _add_score(verbs.add_parser("score", help="log-probabilities and perplexity of given text or tokens"))
    _add_plan(verbs.add_parser("plan", help="what a run needs of a device's memory, before it is allocated"))
    inspect = verbs.add_parser("inspect", help="what a checkpoint directory holds, without loading it")
    inspect.add_argument("directory", type=Path)
    inspect.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    inspect.set_defaults(run=_inspect)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="Hugging Face directory (default: the small one that ships)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of weights and activations (default: the checkpoint's; float32 on a CPU)",
    )
    parser.add_argument("--memory-gib", type=float, metavar="G", help="do with so much of the device's memory")
    parser.add_argument(
        "--kernels",
        choices=KERNELS,
        default="auto",
        help="for attention and recurrence: auto is a GPU in half precision; off is plain jnp, for comparison",
    )


def _add_generate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="raw text to continue; special tokens in it are parsed")
    source.add_argument("--chat", metavar="TEXT", help="a user message, put through the chat template")
    source.add_argument("--token-ids", type=_token_ids, metavar="1,2,3", help="the prompt as ids")
    source.add_argument(
        "--prompts", type=Path, metavar="FILE.jsonl", help="one object a line, with prompt, messages or prompt_ids"
    )
    sampling = parser.add_argument_group("sampling (defaults: the checkpoint's generation_config.json)")
    sampling.add_argument("--max-new-tokens", type=int, metavar="N")
    sampling.add_argument("--min-new-tokens", type=int, metavar="N", help="no stop id before this many tokens")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    sampling.add_argument("--top-k", type=int, metavar="K")
    sampling.add_argument("--top-p", type=float, metavar="P")
    sampling.add_argument("--min-p", type=float, metavar="P")
    sampling.add_argument("--repetition-penalty", type=float, metavar="X")
    sampling.add_argument("--presence-penalty", type=float, metavar="X")
    sampling.add_argument("--frequency-penalty", type=float, metavar="X")
    sampling.add_argument("--seed", type=int, metavar="S", help="the same for every prompt")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="may be given several times")
    sampling.add_argument("--ignore-eos", action="store_true", default=None, help="do not stop at the model's own ids")
    sampling.add_argument("--logprobs", type=int, metavar="N", help="report log-probabilities and N alternatives")
    parser.add_argument("--no-thinking", action="store_true", help="chat without a think block")
    parser.add_argument("--state-dtype", choices=("float32", "float16"), default="float32", help="recurrent state")
    parser.add_argument("--max-batch", type=int, default=8, metavar="N", help="prompts decoded together")
    _add_speculation(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt, on a line of its own")
    parser.set_defaults(run=_generate)


def _add_speculation(parser: argparse.ArgumentParser):
    """Adds the flags of drafting; returns the group of those that name a DFlash2 drafter, of which one may be given."""
    drafts = parser.add_argument_group("speculation")
    drafter = drafts.add_mutually_exclusive_group()
    drafter.add_argument("--drafter", type=Path, metavar="DIR", help="a DFlash2 drafter")
    drafts.add_argument("--speculate", choices=MODES, default="none", metavar="MODE", help=f"one of {', '.join(MODES)}")
    drafts.add_argument("--draft-tokens", type=int, metavar="K", help="that the drafter proposes in a step")
    drafts.add_argument("--verify-tokens", type=int, metavar="K", help="drafts of a block, with those of the lookup")
    drafts.add_argument("--draft-vocab", type=Path, metavar="FILE", help="ids that MTP may draft, a JSON list or .pt")
    drafts.add_argument(
        "--draft-tree",
        type=Path,
        metavar="FILE",
        help="shape of a tree of drafts, as JSON: [[0], [1], [0, 0]]",
    )
    return drafter


def _add_score(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text; special tokens in it are plain text")
    source.add_argument("--token-ids", type=_token_ids, metavar="1,2,3")
    parser.add_argument("--json", action="store_true", help="one JSON object with every log-probability")
    parser.set_defaults(run=_score)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="a directory (default: the small one that ships)"
    )
    weights.add_argument("--like", metavar="NAME", help="as published, without files: qwen3.8-27b-w4a16, ...-fast, ...")
    weights.add_argument("--config", type=Path, metavar="FILE", help="a config.json alone, its weights in floats")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as for generate, on that device")
    parser.add_argument("--memory-gib", type=float, metavar="G", help="of a GPU (default: what this device has free)")
    parser.add_argument("--slots", type=int, default=1, metavar="N", help="sequences at a time (%(default)s)")
    parser.add_argument("--context", type=int, default=8192, metavar="N", help="tokens of each (%(default)s)")
    drafter = _add_speculation(parser)
    drafter.add_argument("--drafter-like", metavar="NAME", help="as published: qwen3.8-27b-dflash2, ...-dflash2-w4a16")
    parser.add_argument("--state-dtype", choices=("float32", "float16"), default="float32", help="recurrent state")
    parser.add_argument("--kv-dtype", metavar="DTYPE", help="keys and values; in this version always the model's")
    parser.add_argument("--json", action="store_true", help="one JSON object, sizes in bytes")
    parser.set_defaults(run=_plan)


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ids separated by commas, got {text!r}") from None


_SAMPLING_FLAGS = (
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "ignore_eos",
    "logprobs",
)


def _generate(args: argparse.Namespace) -> int:
    from qwen38_jax.sampling_params import SamplingParams

    flags = {name: getattr(args, name) for name in _SAMPLING_FLAGS if getattr(args, name) is not None}
    SamplingParams(**flags)  # a bad value is told before the weights are loaded
    if args.logprobs is not None and not args.json:
        raise ValueError("--logprobs reports in JSON only: add --json")
    if args.no_thinking and args.chat is None and args.prompts is None:
        raise ValueError("--no-thinking is for a chat template: use --chat or --prompts")
    lines = None if args.prompts is None else list(_lines(args.prompts))
    from qwen38_jax.engine import Request

    engine = _engine(
        args,
        state_dtype=args.state_dtype,
        max_batch=args.max_batch,
        speculate=args.speculate,
        draft_tokens=args.draft_tokens,
        verify_tokens=args.verify_tokens,
        draft_vocab=args.draft_vocab,
        drafter=args.drafter,
        draft_tree=args.draft_tree,
    )
    sampling = engine.sampling(**flags)
    options = {"sampling": sampling, "thinking": not args.no_thinking}
    if lines is not None:
        return _generate_file(engine, args, lines, options)
    messages = None if args.chat is None else [{"role": "user", "content": args.chat}]
    request = Request(prompt=args.prompt, messages=messages, prompt_ids=args.token_ids, **options)
    if args.json:
        [completion] = engine.generate([request])
        print(_to_json(completion), flush=True)
        return 0
    [completion] = engine.generate([request], on_text=lambda _, text: print(text, end="", flush=True))
    print()
    print(_summary(completion), file=sys.stderr)
    return 0


def _engine(args: argparse.Namespace, **options):
    from qwen38_jax.engine import Engine
    from qwen38_jax.engine.memory import cap_device_memory

    if args.memory_gib is not None:
        cap_device_memory(args.memory_gib)
    options |= {"dtype": args.dtype, "memory_gib": args.memory_gib, "kernels": args.kernels}
    return Engine.from_checkpoint(args.checkpoint, **options)


def _generate_file(engine, args: argparse.Namespace, lines: list[tuple[int, bytes]], options: dict) -> int:
    """Answers a file of prompts. A bad line is reported and left out; the exit code then is 1."""
    from qwen38_jax.engine import Request

    good, bad = [], 0
    for number, line in lines:
        try:
            ids = engine.encode(_request_of_line(line, options))
            good.append((number, Request(prompt_ids=ids, sampling=options["sampling"])))
        except ValueError as error:
            bad += 1
            print(f"{args.prompts}:{number}: {error}", file=sys.stderr)
    for first in range(0, len(good), args.max_batch):
        batch = good[first : first + args.max_batch]
        completions = engine.generate([request for _, request in batch])
        for (number, _), completion in zip(batch, completions, strict=True):
            if args.json:
                print(_to_json(completion, line=number), flush=True)
            else:
                print(f"--- {args.prompts}:{number}\n{completion.text}", flush=True)
                print(_summary(completion), file=sys.stderr)
    if bad:
        print(f"qwen38: {bad} of {bad + len(good)} prompts were left out", file=sys.stderr)
    return 1 if bad else 0


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def _request_of_line(line: bytes, options: dict):
    from qwen38_jax.engine import Request

    try:
        record = json.loads(line)  # its error, and a wrong encoding's, are ValueErrors
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    settings = sorted(record.keys() & {*_SAMPLING_FLAGS, "tools", "thinking"})
    if settings:
        raise ValueError(f"{settings[0]} cannot be set for one prompt; the command's flags hold for all")
    fields = {name: record[name] for name in ("prompt", "messages", "prompt_ids") if name in record}
    expected = {"prompt": str, "messages": list, "prompt_ids": list}
    for name, value in fields.items():
        if not isinstance(value, expected[name]):
            raise ValueError(f"{name} must be a {expected[name].__name__}, got {type(value).__name__}")
    return Request(**fields, **options)


def _to_json(completion, **extra) -> str:
    record = {**extra, **dataclasses.asdict(completion)}
    for name in ("logprobs", "speculation"):
        if record[name] is None:
            del record[name]
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def _summary(completion) -> str:
    steps, seconds = completion.steps, completion.decode_seconds
    text = f"[{completion.prompt_tokens} prompt tokens, {len(completion.token_ids)} new ({completion.finish_reason})"
    if steps:
        emitted = len(completion.token_ids) - 1  # the first comes out of the prefill
        rates = (
            f"{emitted / seconds:.1f} tok/s, {emitted / steps:.2f} tokens/step, {1000 * seconds / steps:.2f} ms/step"
        )
        text += f"; {rates}"
    return text + f"; prefill {completion.prefill_seconds:.2f} s, compile {completion.compile_seconds:.1f} s]"


def _score(args: argparse.Namespace) -> int:
    engine = _engine(args)
    ids = args.token_ids
    if ids is None:
        ids = engine.tokenizer.encode(_read_text(args.text), parse_special=False)
    result = engine.score(ids)
    if args.json:
        record = {
            "token_ids": result.token_ids,
            "logprobs": result.logprobs,
            "tokens": len(result.logprobs),
            "perplexity": result.perplexity,
        }
        print(json.dumps(record))
    else:
        print(f"{len(result.logprobs)} tokens scored, perplexity {result.perplexity:.4f}")
    return 0


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None


def _plan(args: argparse.Namespace) -> int:
    from qwen38_jax.checkpoint.draft_ids import read_vocabulary
    from qwen38_jax.drafters.modes import plan
    from qwen38_jax.engine.memory import card_budget, device_budget
    from qwen38_jax.engine.plan import Settings, Weights
    from qwen38_jax.engine.plan_report import make_report, to_json, to_text
    from qwen38_jax.tree import read_tree

    account, drafter = _accounts(args)
    ids = None if args.draft_vocab is None else read_vocabulary(args.draft_vocab, account.cfg.vocab_size)
    tree = None if args.draft_tree is None else read_tree(args.draft_tree)
    dflash2 = None if drafter is None else drafter.cfg
    planned = plan(args.speculate, args.draft_tokens, args.verify_tokens, dflash2, tree)
    weights = Weights.of_accounts(account, drafter, None if ids is None else len(ids))
    cfg = weights.cfg
    if args.context > cfg.max_position_embeddings:
        raise ValueError(f"--context {args.context}: the model's context is {cfg.max_position_embeddings}")
    if args.kv_dtype not in (None, cfg.dtype):
        raise ValueError(f"--kv-dtype {args.kv_dtype}: this version keeps keys and values as the model's {cfg.dtype}")
    settings = Settings(
        slots=args.slots,
        context=args.context,
        state_dtype=args.state_dtype,
        drafters=() if args.speculate == "none" else tuple(args.speculate.split("+")),
        verify_rows=0 if planned is None else planned[1].verify_tokens + 1,
    )
    budget = device_budget() if args.memory_gib is None else card_budget(args.memory_gib)
    report = make_report(weights, settings, budget)
    print(json.dumps(to_json(report), indent=2) if args.json else to_text(report))
    return 0 if report.fits else 1


def _accounts(args: argparse.Namespace):
    """What is known of the weights, without reading them: of the model, and of a DFlash2 drafter or None."""
    import jax

    from qwen38_jax.checkpoint import synthetic
    from qwen38_jax.checkpoint.drafter import drafter_account
    from qwen38_jax.checkpoint.files import read_json
    from qwen38_jax.checkpoint.load import sound_account
    from qwen38_jax.config import ModelConfig
    from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT

    def published(name: str, known: Sequence[str], dtype: str | None):
        if name not in known:
            raise ValueError(f"nothing is published as {name!r}; known: {', '.join(known)}")
        return unwritten(synthetic.recipe(name), dtype)

    def unwritten(recipe, dtype: str | None):
        cfg = recipe.cfg if dtype is None else dataclasses.replace(recipe.cfg, dtype=dtype)
        return synthetic.account(dataclasses.replace(recipe, cfg=cfg))

    dtype = args.dtype
    if dtype is None and args.memory_gib is None and jax.default_backend() == "cpu":
        dtype = "float32"  # as generate takes it here
    if args.like is not None:
        account = published(args.like, synthetic.MODELS, dtype)
    elif args.config is not None:
        account = unwritten(synthetic.stored_as("bf16", ModelConfig.from_hf(read_json(args.config))), dtype)
    else:
        account, _, _ = sound_account(args.checkpoint or SHIPPED_CHECKPOINT, dtype=dtype)
    if args.drafter is not None:
        return account, drafter_account(args.drafter, dtype=account.cfg.dtype)
    if args.drafter_like is not None:
        return account, published(args.drafter_like, synthetic.DRAFTERS, account.cfg.dtype)
    return account, None


def _inspect(args: argparse.Namespace) -> int:
    from qwen38_jax.checkpoint import describe, format_description

    description = describe(args.directory)
    if args.json:
        print(json.dumps(dataclasses.asdict(description), default=str, indent=2))
    else:
        print(format_description(description))
    return 0


if __name__ == "__main__":
    sys.exit(main())
