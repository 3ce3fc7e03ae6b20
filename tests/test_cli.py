"""The command as a user types it: output on stdout, one line of error on stderr, exit codes."""

import dataclasses
import json
import subprocess
import sys

import pytest

from qwen38_jax.checkpoint.load import read_config
from qwen38_jax.cli import main


def cli(capsys, *args):
    """Exit code, stdout, stderr of `qwen38 ARGS` in this process."""
    try:
        code = main([str(a) for a in args])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


GREEDY = ("--temperature", "0", "--max-new-tokens", "8")


def test_help_imports_no_jax():
    """Which is what makes it answer at once."""
    code = (
        "import sys; from qwen38_jax.cli import main\ntry: main(['--help'])\nfinally: assert 'jax' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0 and "generate" in result.stdout, result.stderr


def test_prompt_with_json(capsys):
    code, out, _ = cli(capsys, "generate", "--prompt", "def add(a, b):", *GREEDY, "--json")
    [record] = map(json.loads, out.splitlines())
    assert code == 0 and record["finish_reason"] in ("stop", "length")
    assert 1 <= len(record["token_ids"]) <= 8 and record["steps"] == len(record["token_ids"]) - 1
    assert {"text", "prompt_tokens", "prefill_seconds", "decode_seconds"} <= record.keys()
    ids = ",".join(map(str, record["token_ids"]))
    code, out, _ = cli(capsys, "generate", "--token-ids", ids, *GREEDY, "--json")
    assert code == 0 and json.loads(out)["prompt_tokens"] == len(record["token_ids"])


def test_chat_streams_text_and_ends_with_the_figures(capsys):
    code, out, err = cli(capsys, "generate", "--chat", "Hello", "--no-thinking", *GREEDY)
    assert code == 0 and out.strip()
    assert all(word in err for word in ("tok/s", "tokens/step", "ms/step", "prefill"))


def test_seed_makes_sampling_repeatable(capsys):
    runs = [
        json.loads(cli(capsys, "generate", "--prompt", "import", "--temperature", "1", "--seed", s, "--top-p", "1",
                       "--top-k", "0", "--max-new-tokens", "12", "--json")[1])["token_ids"]
        for s in (1, 1, 2)
    ]  # fmt: skip
    assert runs[0] == runs[1] != runs[2]


def test_prompt_file_goes_on_past_bad_lines(capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    good = [{"prompt": "x = 1"}, {"prompt_ids": [5, 6]}, {"messages": [{"role": "user", "content": "hi"}], "id": 7}]
    bad = [b"{not json", b"[1]", b'{"prompt": ""}', b'{"prompt_ids": [99999999]}', b'{"prompt": 1}', b"{}", b'"\xff"']
    bad += [b"[" * 100000, b'{"prompt": "x", "temperature": 1}']
    lines = [json.dumps(record).encode() for record in good]
    path.write_bytes(b"\n".join([lines[0], *bad, b"", lines[1], lines[2]]))
    code, out, err = cli(capsys, "generate", "--prompts", path, *GREEDY, "--json", "--no-thinking")
    assert code == 1
    assert [json.loads(line)["line"] for line in out.splitlines()] == [1, 12, 13]
    for number in range(2, 11):
        assert f"{path}:{number}: " in err
    assert "9 of 12" in err


def test_score(capsys, tmp_path):
    path = tmp_path / "text.py"
    path.write_text("import os\n\n\ndef main():\n    return os.getcwd()\n")
    code, out, _ = cli(capsys, "score", "--text", path, "--json")
    record = json.loads(out)
    assert code == 0 and record["tokens"] == len(record["logprobs"]) == len(record["token_ids"]) - 1
    assert 1 < record["perplexity"] < 1000
    ids = ",".join(map(str, record["token_ids"]))
    code, out, _ = cli(capsys, "score", "--token-ids", ids, "--memory-gib", "2")
    assert code == 0 and f"{record['perplexity']:.4f}" in out


def test_inspect(capsys):
    from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT

    code, out, _ = cli(capsys, "inspect", SHIPPED_CHECKPOINT)
    assert code == 0 and "gated_delta_net" in out
    code, out, _ = cli(capsys, "inspect", SHIPPED_CHECKPOINT, "--json")
    assert json.loads(out)["mtp"] == "present"


def test_plan(capsys):
    fast = ("plan", "--like", "qwen3.8-27b-fast", "--memory-gib", "24", "--slots", "4")
    code, out, _ = cli(capsys, *fast)
    assert code == 0 and "fits, " in out and "a memory of 24 GiB" in out and "2,147,483,648" in out
    drafter = ("--speculate", "dflash2+lookup", "--drafter-like", "qwen3.8-27b-dflash2-w4a16", "--json")
    code, out, _ = cli(capsys, *fast, "--context", "65536", *drafter)
    record = json.loads(out)
    assert code == 1 and not record["fits"] and record["total"] > record["budget"]["nbytes"]
    assert record["total"] == sum(item["nbytes"] for item in record["items"])
    assert all(change["total"] <= record["budget"]["nbytes"] for change in record["fitting"]) and record["fitting"]
    assert record["settings"]["verify_rows"] == 16 and record["dtype"] == "bfloat16"
    code, out, _ = cli(capsys, *fast, "--context", "65536", *drafter[:-1], "--verify-tokens", "7")
    assert code == 1 and "too much" in out and "would fit: 16,384 tokens" in out


def test_plan_of_the_shipped_checkpoint_is_what_generate_takes_here(capsys):
    from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
    from qwen38_jax.params import byte_count

    code, out, _ = cli(capsys, "plan", "--json")
    record = json.loads(out)
    assert code == 0 and record["fits"] and record["dtype"] == "float32"
    cfg = read_config(SHIPPED_CHECKPOINT)[2]
    weights = sum(item["nbytes"] for item in record["items"] if item["part"] == "weights")
    assert weights == byte_count(dataclasses.replace(cfg, dtype="float32"))
    _, out, _ = cli(capsys, "plan", "--json", "--config", SHIPPED_CHECKPOINT / "config.json", "--dtype", "bfloat16")
    halved = sum(item["nbytes"] for item in json.loads(out)["items"] if item["part"] == "weights")
    assert weights / 2 <= halved < 0.51 * weights


def test_memory_gib(capsys):
    code, out, err = cli(capsys, "generate", "--prompt", "x", *GREEDY, "--memory-gib", "0.01")
    assert code == 1 and not out and "a memory of 0.01 GiB leaves 0.01 GiB" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "args,words",
    [
        (("plan", "--like", "x"), "qwen3.8-27b-w4a16"),
        (("plan", "--like", "qwen3.8-27b", "--kv-dtype", "int8", "--memory-gib", "24"), "--kv-dtype int8"),
        (("plan", "--speculate", "dflash2"), "--drafter"),
        (("plan", "--drafter-like", "qwen3.8-27b-dflash2"), "choose dflash2 or"),
        (("plan", "--drafter", "/nonexistent", "--speculate", "dflash2"), "/nonexistent"),
        (("plan", "--drafter-like", "tiny", "--speculate", "dflash2"), "qwen3.8-27b-dflash2"),
        (("plan", "--drafter-like", "qwen3.8-27b-dflash2", "--speculate", "dflash2"), "trained for this model"),
        (("plan", "--speculate", "mtp", "--verify-tokens", "9"), "more than the 4"),
        (("plan", "--verify-tokens", "4"), "choose a mode"),
        (("plan", "--speculate", "lookup", "--verify-tokens", "0"), "verify_tokens"),
        (("plan", "--speculate", "mtp", "--draft-vocab", "/nonexistent.pt"), "/nonexistent.pt"),
        (("plan", "--config", "/nonexistent.json"), "/nonexistent.json"),
        (("plan", "--context", "9999999"), "context is"),
        (("plan", "--slots", "0"), "slots"),
        (("plan", "--memory-gib", "1"), "1 GiB"),
        (("generate", "--prompt", "x", "--memory-gib", "-1"), "-1 GiB"),
        (("generate", "--prompt", "x", "--checkpoint", "/nonexistent"), "/nonexistent"),
        (("generate", "--prompt", ""), "empty"),
        (("generate", "--prompt", "x", "--temperature", "-1"), "temperature"),
        (("generate", "--prompt", "x", "--top-p", "2"), "top_p"),
        (("generate", "--prompt", "x", "--max-new-tokens", "0"), "max_new_tokens"),
        (("generate", "--prompt", "x", "--stop", ""), "stop"),
        (("generate", "--token-ids", "-1"), "-1"),
        (("generate", "--prompts", "/nonexistent.jsonl"), "/nonexistent.jsonl"),
        (("generate", "--prompt", "x", "--max-batch", "0"), "max_batch"),
        (("generate", "--prompt", "x", "--logprobs", "2"), "--json"),
        (("generate", "--prompt", "x", "--no-thinking"), "--chat"),
        (("generate", "--prompt", "x", "--speculate", "dflash2"), "--drafter"),
        (("generate", "--prompt", "x", "--speculate", "dflash2", "--drafter", "/nonexistent"), "/nonexistent"),
        (("generate", "--prompt", "x", "--draft-tokens", "3"), "choose a mode"),
        (("generate", "--prompt", "x", "--speculate", "mtp", "--verify-tokens", "9"), "more than the 4"),
        (("generate", "--prompt", "x", "--speculate", "lookup", "--draft-vocab", "ids.pt"), "for the MTP head"),
        (("generate", "--prompt", "x", "--speculate", "mtp", "--draft-vocab", "/nonexistent.pt"), "/nonexistent.pt"),
        (("score", "--token-ids", "5"), "2 to"),
        (("score", "--text", "/nonexistent"), "/nonexistent"),
        (("inspect", "/nonexistent"), "/nonexistent"),
    ],
)
def test_errors_are_one_line_and_exit_1(capsys, args, words):
    code, out, err = cli(capsys, *args)
    assert code == 1 and not out
    assert err.startswith("qwen38: error: ") and words in err and err.count("\n") == 1


def test_drafts_are_counted(capsys, tmp_path):
    """Even with a draft vocabulary that leaves next to nothing to draft, the text is that of plain decoding."""
    (tmp_path / "ids.json").write_text(json.dumps(list(range(139, 99, -1))))
    ask = ("generate", "--prompt", "def add(a, b):", *GREEDY, "--json")
    _, plain, _ = cli(capsys, *ask)
    flags = ("--speculate", "mtp", "--draft-tokens", "2", "--draft-vocab", tmp_path / "ids.json")
    code, out, _ = cli(capsys, *ask, *flags)
    plain, record = json.loads(plain), json.loads(out)
    assert code == 0 and record["token_ids"] == plain["token_ids"] and "speculation" not in plain
    counts = record["speculation"]
    assert counts["emitted"] == len(record["token_ids"]) - 1
    assert counts["by_source"]["mtp"] == counts["by_position"] and len(counts["by_position"]["drafted"]) == 2


def test_reader_that_has_seen_enough(tmp_path):
    """As `| head -1`: no error, no traceback."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n' * 3)
    command = [sys.executable, "-m", "qwen38_jax.cli", "generate", "--prompts", str(path), "--max-batch", "1", *GREEDY]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert "error" not in process.stderr.read().lower() and process.wait() == 1


def test_dtypes_and_stop_strings(capsys):
    flags = ("--dtype", "bfloat16", "--state-dtype", "float16", "--stop", "\n", "--json", *GREEDY)
    code, out, _ = cli(capsys, "generate", "--prompt", "import os\n", *flags)
    assert code == 0 and "\n" not in json.loads(out)["text"]


@pytest.mark.parametrize(
    "args", [(), ("generate",), ("generate", "--prompt", "a", "--chat", "b"), ("generate", "--token-ids", "a"),
             ("generate", "--prompt", "a", "--speculate", "eagle"), ("score",)]
)  # fmt: skip
def test_wrong_usage_exits_2(capsys, args):
    assert cli(capsys, *args)[0] == 2
