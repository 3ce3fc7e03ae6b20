"""What a checkpoint directory holds, told from its headers; for broken and quantised ones too."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

from qwen38_jax.checkpoint import names
from qwen38_jax.checkpoint.accounting import Account, Assignment, take_account
from qwen38_jax.checkpoint.drafter import DRAFTER_CLASSES, drafter_class, read_drafter_config, take_drafter_account
from qwen38_jax.checkpoint.files import CheckpointError, Inventory, read_json, take_inventory
from qwen38_jax.checkpoint.load import read_config
from qwen38_jax.config import is_dflash2

_LISTED = 10  # names and problems shown in the terminal


@dataclasses.dataclass(frozen=True)
class LayerClass:
    """The tensors of one class, e.g. `mlp`: how many, their bytes, and how many of each safetensors dtype.

    `formats` counts the class's weights by how they are stored, e.g. `int4 group 128 (GPTQ)`; a weight whose format is
    not understood is in the description's `problems` instead.
    """

    name: str
    tensors: int
    nbytes: int
    dtypes: dict[str, int]
    formats: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Description:
    """A checkpoint directory at a glance; `dataclasses.asdict` of it is ready for JSON.

    Attributes:
      kind: `model` or `DFlash2 drafter`, by config.json.
      config: the fields of `ModelConfig` (or `DFlash2Config`) as loading would set them, or None when config.json is
        unusable.
      quantised: the format, or None for a dense checkpoint.
      mtp: `present`, `incomplete` or `absent`.
      eos_token_ids: the ids that end a generation.
      missing, unexpected: tensor names as the checkpoint spells (or would spell) them.
      problems: why loading would fail, one message each.
    """

    path: str
    kind: str
    config: dict[str, Any] | None
    prefix: str | None
    quantised: str | None
    classes: tuple[LayerClass, ...]
    mtp: str
    tokenizer: bool
    chat_template: bool
    generation_config: bool
    eos_token_ids: tuple[int, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def loadable(self) -> bool:
        return not self.problems


def describe(directory: str | Path) -> Description:
    """Describes a checkpoint without reading tensor data.

    Raises:
      CheckpointError: the directory does not exist. Every other fault is in the result's `problems`.
    """
    directory = Path(directory)
    inventory = take_inventory(directory)
    problems = list(inventory.problems)
    account, is_drafter = None, False
    try:
        is_drafter = is_dflash2(read_json(directory / "config.json"))
        account = _account(directory, inventory, is_drafter)
        problems += account.problems
    except CheckpointError as error:
        problems.append(str(error))
    cfg = account.cfg if account else None
    classes = _layer_classes(inventory, account, is_drafter)
    has_mtp = any(part.name == "mtp" for part in classes)
    mtp_missing = account is not None and any(names.parse(name).kind == "mtp" for name in account.missing)
    return Description(
        path=str(directory),
        kind="DFlash2 drafter" if is_drafter else "model",
        config=None if cfg is None else dataclasses.asdict(cfg),
        prefix=account.prefix if isinstance(account, Account) else None,
        quantised=account.quantised if account else None,
        classes=classes,
        mtp="absent" if not has_mtp else "incomplete" if mtp_missing else "present",
        tokenizer=(directory / "tokenizer.json").is_file(),
        chat_template=_has_chat_template(directory),
        generation_config=(directory / "generation_config.json").is_file(),
        eos_token_ids=account.cfg.eos_token_ids if isinstance(account, Account) else (),
        missing=account.missing if account else (),
        unexpected=account.unexpected if account else (),
        problems=tuple(problems),
        notes=account.notes if account else inventory.notes,
    )


def _account(directory: Path, inventory: Inventory, is_drafter: bool) -> Assignment:
    if is_drafter:
        hf_config, cfg = read_drafter_config(directory)
        return take_drafter_account(inventory, cfg, hf_config)
    hf_config, _, cfg = read_config(directory)
    return take_account(inventory, cfg, hf_config)


def _layer_classes(inventory: Inventory, account: Assignment | None, is_drafter: bool) -> tuple[LayerClass, ...]:
    def class_of(name: str) -> str:
        return drafter_class(name) if is_drafter else names.layer_class(names.parse(name))

    groups = {name: [] for name in (DRAFTER_CLASSES if is_drafter else names.LAYER_CLASSES)}
    formats = {name: Counter() for name in groups}
    for name, stored in account.stored.items() if account else ():
        formats[class_of(name)][stored.label] += 1
    for name, tensor in inventory.tensors.items():
        groups[class_of(name)].append(tensor)
    return tuple(
        LayerClass(
            name=name,
            tensors=len(tensors),
            nbytes=sum(tensor.nbytes for tensor in tensors),
            dtypes=dict(Counter(tensor.dtype for tensor in tensors).most_common()),
            formats=dict(formats[name].most_common()),
        )
        for name, tensors in groups.items()
        if tensors
    )


def _has_chat_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file():
        return True
    try:
        return bool(read_json(directory / "tokenizer_config.json").get("chat_template"))
    except CheckpointError:
        return False


def format_description(description: Description) -> str:
    """The description as lines for a terminal."""
    d = description
    lines = [d.path, *_config_lines(d)]
    rows = [("class", "tensors", "MB", "weights, by format")]
    rows += [
        (
            part.name,
            str(part.tensors),
            f"{part.nbytes / 1e6:,.1f}",
            ", ".join(f"{n} {k}" for k, n in (part.formats or part.dtypes).items()),
        )
        for part in d.classes
    ]
    total = sum(part.tensors for part in d.classes), sum(part.nbytes for part in d.classes)
    rows.append(("total", str(total[0]), f"{total[1] / 1e6:,.1f}", ""))
    lines += ["", *(f"  {a:<16}{b:>8}{c:>14}  {e}".rstrip() for a, b, c, e in rows), ""]
    files = {}
    if d.kind == "model":
        files = {
            "MTP head": d.mtp,
            "tokenizer": _presence(d.tokenizer),
            "chat template": _presence(d.chat_template),
            "generation config": _presence(d.generation_config),
            "stop ids": ", ".join(map(str, d.eos_token_ids)) or "none",
        }
    files["quantised"] = d.quantised or "no"
    lines += [f"  {key:<18}{value}" for key, value in files.items()]
    for title in ("missing", "unexpected", "problems", "notes"):
        lines += _listing(title, getattr(d, title))
    lines += ["", "  can be loaded" if d.loadable else "  cannot be loaded"]
    return "\n".join(lines)


def _presence(present: bool) -> str:
    return "present" if present else "absent"


def _config_lines(d: Description) -> list[str]:
    if d.config is None:
        return ["  no usable config.json"]
    c = d.config
    if d.kind != "model":
        return [
            f"  {d.kind} of {c['num_hidden_layers']} layers, blocks of {c['block_size']}, window {c['sliding_window']}",
            f"  for a target of {c['num_target_layers']} layers, hidden {c['hidden_size']}, vocabulary"
            f" {c['vocab_size']}; reads layers {', '.join(map(str, c['target_layer_ids']))}",
            f"  hidden {c['hidden_size']}, MLP {c['intermediate_size']}, {c['dtype']}, attention"
            f" {c['num_attention_heads']} query / {c['num_key_value_heads']} key-value heads of {c['head_dim']}",
            f"  selector of rank {c['selector_rank']} over {c['selector_top_k']} candidates",
        ]
    groups = c["num_hidden_layers"] // (c["linear_per_group"] + 1)
    return [
        f"  {c['num_hidden_layers']} layers: {groups} x ({c['linear_per_group']} Gated DeltaNet, 1 attention)",
        f"  hidden {c['hidden_size']}, MLP {c['intermediate_size']}, vocabulary {c['vocab_size']}, {c['dtype']},"
        f" {'tied' if c['tie_word_embeddings'] else 'untied'} head",
        f"  attention {c['num_attention_heads']} query / {c['num_key_value_heads']} key-value heads of {c['head_dim']},"
        f" rotary {c['rotary_dim']}, theta {c['rope_theta']:g}",
        f"  Gated DeltaNet {c['linear_num_key_heads']} key heads of {c['linear_key_head_dim']},"
        f" {c['linear_num_value_heads']} value heads of {c['linear_value_head_dim']},"
        f" convolution {c['linear_conv_kernel_dim']}",
        f"  tensor names begin with {d.prefix!r}",
    ]


def _listing(title: str, entries: tuple[str, ...]) -> list[str]:
    if not entries:
        return []
    more = [f"    ... and {len(entries) - _LISTED} more"] if len(entries) > _LISTED else []
    return ["", f"  {title} ({len(entries)})", *(f"    {entry}" for entry in entries[:_LISTED]), *more]
