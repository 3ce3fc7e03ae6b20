"""Makes a checkpoint ready for one card: heads and drafters in integers, matrices fused, in the layout of the kernels.

What comes out is described in `native`; `manifest.json` beside it says what was done to which tensor.
"""

import copy
import dataclasses
import functools
import hashlib
import math
import shutil
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from qwen38_jax import __version__
from qwen38_jax.checkpoint import names
from qwen38_jax.checkpoint.accounting import Account
from qwen38_jax.checkpoint.draft_ids import DRAFT_IDS, read_vocabulary, write_draft_ids
from qwen38_jax.checkpoint.drafter import DrafterAccount, drafter_account, drafter_places, read_drafter_config
from qwen38_jax.checkpoint.files import DTYPES, INDEX, CheckpointError, take_inventory
from qwen38_jax.checkpoint.formats import Stored
from qwen38_jax.checkpoint.leaves import Block, is_table, leaf_blocks
from qwen38_jax.checkpoint.load import check_tied, sound_account
from qwen38_jax.checkpoint.names import Place
from qwen38_jax.checkpoint.native import KEY, Native, Spec, leaf_of, native_place
from qwen38_jax.checkpoint.resumable import Shard, write_resumably
from qwen38_jax.checkpoint.rewrite import Origin, Piece
from qwen38_jax.checkpoint.write import NewTensor, copy_tokenizer, natural_order, write_json
from qwen38_jax.quantization import LAYOUTS

MANIFEST = "manifest.json"
DRAFTER = "drafter"
GROUP = 128  # columns that share a scale, where it divides a row; else the largest power of two that does
CHOICES = ("int8", "int4", "keep")

_BITS = {"int8": 8, "int4": 4}
# Leaves that are multiplied and large. in_proj_a and in_proj_b have too few rows; a drafter's convolutions and selector
# are small as well, or tables.
_LINEARS = {"qkv", "o", "qkvz", "out", "gate_up", "down", "fc", "q", "kv"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to do. `int8` and `int4` round floats to the nearest; integers of the source stay as they are.

    Attributes:
      head, embedding, mtp, body, drafter_linears: one of `CHOICES`; None is int8 for what the source has in floats. The
        embedding is looked up row by row and has no int4. Rows of the head for the MTP head to draft from, if there are
        any, are stored as the head.
      drafter: directory of a DFlash2 drafter, which becomes DST/drafter.
      draft_vocab: file with the ids of the tokens that the MTP head may draft (`draft_ids.read_vocabulary`), for which
        the rows are cut from the head; None keeps those that the source has.
      layout: of matrices that are multiplied, a key of `quantization.LAYOUTS`; None is that of the kernels where it can
        hold the matrix, and "rows" where not.
    """

    head: str | None = None
    embedding: str | None = None
    mtp: str | None = None
    body: str | None = "keep"
    drafter: Path | None = None
    drafter_linears: str | None = None
    draft_vocab: Path | None = None
    layout: str | None = None

    def __post_init__(self):
        for name in ("head", "embedding", "mtp", "body", "drafter_linears"):
            allowed = ("int8", "keep") if name == "embedding" else CHOICES
            if getattr(self, name) not in (None, *allowed):
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.layout not in (None, *LAYOUTS):
            raise ValueError(f"layout {self.layout!r} is unknown; expected one of {', '.join(LAYOUTS)}")
        if self.drafter_linears and self.drafter is None:
            raise ValueError("drafter_linears asks for a format of a drafter, but no drafter is given")


@dataclasses.dataclass(frozen=True)
class Part:
    """A directory of the result: the model's, or the drafter's within it.

    Attributes:
      into: its path within the result, with a slash behind it; empty for the model.
      config: the config.json to write.
      pieces: by file name.
      inputs: the files that it is made from, by the name that the manifest gives them.
    """

    into: str
    config: dict[str, Any]
    pieces: dict[str, list[Piece]]
    inputs: dict[str, Path]

    @property
    def shards(self) -> list[Shard]:
        return [
            Shard(self.into + file, sum(piece.nbytes for piece in own), functools.partial(_make, own))
            for file, own in self.pieces.items()
        ]

    def write_small_files(self, directory: Path) -> None:
        """config.json and the index."""
        pieces = [(file, piece) for file, own in self.pieces.items() for piece in own]
        weight_map = {f"{piece.name}.{field}": file for file, piece in pieces for field in piece.fields}
        total = sum(piece.nbytes for _, piece in pieces)
        write_json(directory / self.into / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        write_json(directory / self.into / "config.json", self.config)


@dataclasses.dataclass(frozen=True)
class Preparation:
    """A checked plan, of which nothing has been done yet.

    Attributes:
      source: directory of the checkpoint.
      options: see there.
      parts: the model and, if there is one, the drafter.
      shards: the files to write, of all parts.
      draft_ids: tokens of the draft head's rows, or None.
      left_out: tensors of the source that have no place here, such as those of a vision tower.
    """

    source: Path
    options: Options
    parts: tuple[Part, ...]
    shards: tuple[Shard, ...]
    draft_ids: np.ndarray | None
    left_out: tuple[str, ...]

    @property
    def inputs(self) -> dict[str, Path]:
        """The files whose bytes decide the result, by the name that the manifest gives them."""
        return {name: path for part in self.parts for name, path in part.inputs.items()}

    @property
    def nbytes(self) -> int:
        """Bytes to be read for checksums and to be written: what `run` counts its progress in."""
        return sum(shard.nbytes for shard in self.shards) + sum(path.stat().st_size for path in self.inputs.values())

    def run(self, destination: str | Path, advance: Callable[[int], object] = lambda n: None) -> dict[str, Any]:
        """Writes the new directory `destination`, or goes on with what an earlier run left; returns the manifest.

        The host holds the arrays of one shard (a layer, the embedding, a head) at a time. `advance` is called with
        numbers of bytes that add up to `nbytes`.

        Raises:
          CheckpointError: as `resumable.write_resumably` does; or a value of the source is not finite, or its files
            contradict each other in a way that only their contents show.
        """
        destination = Path(destination)
        _check_apart(destination, [self.source, *([self.options.drafter] if self.options.drafter else [])])
        settings = dataclasses.asdict(self.options)
        settings |= {key: value.name for key, value in settings.items() if isinstance(value, Path)}
        sources = {name: _checksum(path, advance) for name, path in self.inputs.items()}
        manifest = {"format": 1, "made_by": f"qwen38_jax {__version__}", "options": settings, "sources": sources}

        def finish(directory: Path, records: dict[str, Any]) -> None:
            tensors = {name: records[name] for name in sorted(records, key=natural_order)}
            manifest.update(tensors=tensors, left_out=list(self.left_out))
            self._write_small_files(directory, manifest)

        write_resumably(destination, self.shards, manifest, finish, advance)
        return manifest

    def _write_small_files(self, directory: Path, manifest: dict[str, Any]) -> None:
        if self.draft_ids is not None:
            write_draft_ids(directory / DRAFT_IDS, self.draft_ids)
        if (self.source / "tokenizer.json").is_file():
            copy_tokenizer(self.source, directory)
        if (self.source / "generation_config.json").is_file():
            shutil.copyfile(self.source / "generation_config.json", directory / "generation_config.json")
        for part in self.parts:
            part.write_small_files(directory)
        write_json(directory / MANIFEST, manifest)


def plan_preparation(source: str | Path, options: Options) -> Preparation:
    """Reads headers and small tensors, and decides what becomes of each tensor.

    Raises:
      CheckpointError: the source is no whole checkpoint, or the options ask for what it does not have or cannot become.
    """
    source = Path(source)
    account, hf_config, _ = sound_account(source)
    if options.drafter is None and (source / DRAFTER / "config.json").is_file():
        options = dataclasses.replace(options, drafter=source / DRAFTER, drafter_linears="keep")
    _check_options(account, options)
    ids = account.draft_ids
    if options.draft_vocab is not None:
        ids = read_vocabulary(options.draft_vocab, account.cfg.vocab_size)
    inputs = _inputs(source, account)
    if options.draft_vocab is not None:
        inputs[f"draft vocabulary {options.draft_vocab.name}"] = options.draft_vocab
    elif ids is not None:
        inputs[DRAFT_IDS] = source / DRAFT_IDS
    pieces = _model_pieces(account, options, ids)
    parts = [Part("", _config(hf_config, account.prefix, pieces), _by_file(pieces), inputs)]
    if options.drafter is not None:
        parts.append(_drafter(options))
    vision = [name for name in take_inventory(source).tensors if names.parse(name).kind == "vision"]
    shards = [shard for part in parts for shard in part.shards]
    return Preparation(source, options, tuple(parts), tuple(shards), ids, tuple(vision))


def _drafter(options: Options) -> Part:
    account = drafter_account(options.drafter)
    hf_config, cfg = read_drafter_config(options.drafter)
    pieces = []
    for hf_place, place in zip(drafter_places(cfg), account.places, strict=True):
        made = _leaf_pieces(hf_place, place, account, options, "drafter_linears" if _is_linear(place.path) else None)
        for piece in made:
            origins = tuple(dataclasses.replace(o, tensor=f"{DRAFTER}: {o.tensor}") for o in piece.origins)
            pieces.append(dataclasses.replace(piece, origins=origins))
    inputs = {f"{DRAFTER}/{name}": path for name, path in _inputs(options.drafter, account).items()}
    return Part(f"{DRAFTER}/", _config(hf_config, "", pieces), _by_file(pieces), inputs)


def _check_options(account: Account, options: Options) -> None:
    cfg = account.cfg
    if cfg.tie_word_embeddings:
        check_tied(account.sources)
    if options.head and cfg.tie_word_embeddings:
        raise CheckpointError("the embedding is the head of this checkpoint: ask for a format of the embedding alone")
    if options.mtp and not cfg.mtp_num_hidden_layers:
        raise CheckpointError("a format of the MTP head is asked for, but the checkpoint has no MTP head")
    if options.draft_vocab and not cfg.mtp_num_hidden_layers:
        raise CheckpointError("a draft vocabulary is for the MTP head, and the checkpoint has none")


def _check_apart(destination: Path, sources: Iterable[Path]) -> None:
    inner = destination.resolve()
    for outer in (source.resolve() for source in sources):
        if inner == outer or outer in inner.parents or inner in outer.parents:
            raise CheckpointError(f"{destination} and {outer} are not apart: choose a destination beside the source")


def _model_pieces(account: Account, options: Options, ids: np.ndarray | None) -> list[Piece]:
    """All that is to be written of the model, the draft head last."""
    hf_places = {place.path: place for place in names.places(account.cfg)}
    if ids is not None:
        hf_places["draft_head"] = names.draft_place(account.cfg, len(ids))
    cut = options.draft_vocab is not None
    pieces = [
        piece
        for place in account.places
        if not (cut and place.path == "draft_head")  # which the new one replaces
        for piece in _leaf_pieces(hf_places[place.path], place, account, options, _option(place.path))
    ]
    if cut:
        head = "embed" if account.cfg.tie_word_embeddings else "lm_head"
        pieces += [_draft_piece(piece, ids, options) for piece in pieces if piece.name == head]
    return pieces


def _leaf_pieces(
    hf_place: Place, place: Place, account: Account | DrafterAccount, options: Options, option: str | None
) -> list[Piece]:
    """One leaf, about which `option` is; `hf_place` says which tensors it is, `place` which fill it in the source."""
    stored = [account.stored[name] for name in place.names]
    dtype, cast = _float_dtype(stored, account.cfg.dtype)
    read_as = "float32" if cast else dtype
    place = dataclasses.replace(place, info=dataclasses.replace(place.info, dtype=read_as))
    blocks = leaf_blocks(place, account.stored)
    parts = hf_place.slices
    new_place = native_place(hf_place, apart=len(blocks) > 1)
    pieces = []
    for i, (block, new) in enumerate(zip(blocks, new_place.slices, strict=True)):
        own = range(len(parts)) if len(blocks) == 1 else [i]
        target = _target(place.path, block, options, option)
        for layer, name in enumerate(new.names):
            origins = [
                Origin(parts[j].names[layer], parts[j].shape[0], _label(place, j, layer, account.stored)) for j in own
            ]
            pieces.append(
                Piece(
                    name=name.removesuffix(".weight"),
                    arrays={field: layers[layer] for field, layers in block.arrays.items()},
                    shape=block.shape,
                    source=block.spec,
                    target=target,
                    dtype=dtype,
                    cast=cast,
                    ids=None,
                    origins=tuple(origins),
                )
            )
    return pieces


def _label(place: Place, part: int, layer: int, stored: dict[str, Stored]) -> str:
    """The format of a slice in the source, which may have fused it with others."""
    part = part if len(place.slices) > 1 else 0
    return stored[place.slices[part].names[layer]].label


def _draft_piece(head: Piece, ids: np.ndarray, options: Options) -> Piece:
    """Rows of the head. They are multiplied even where the head is the embedding."""
    target = head.target and _arranged(head.target, "draft_head", (len(ids), head.shape[1]), head.arrays, options)
    origin = Origin(names.DRAFT_HEAD, len(ids), f"rows of {head.origins[0].tensor}, {head.origins[0].was}")
    return dataclasses.replace(head, name="draft_head", target=target, ids=ids, origins=(origin,))


def _float_dtype(stored: list[Stored], model_dtype: str) -> tuple[str, bool]:
    """The dtype in which floats of a leaf are kept exactly, or the model's and True where some are FP8."""
    if any(one.kind == "fp8" for one in stored):
        return model_dtype, True
    dtypes = {DTYPES[one.main.dtype] for one in stored if one.kind == "dense"} or {model_dtype}
    return (dtypes.pop() if len(dtypes) == 1 else "float32"), False


def _target(path: str, block: Block, options: Options, option: str | None) -> Spec | None:
    """How a block is to be quantised; None for floats."""
    choice = getattr(options, option) if option else "keep"
    if block.spec is not None:
        if path != "draft_head" and choice in _BITS and _BITS[choice] != block.spec.bits:
            raise CheckpointError(
                f"{option} is to be {choice}, but the source has {path} in {block.spec.label}: rounding twice loses "
                f"twice; keep it, or start from a checkpoint that has it in floats"
            )
        return _arranged(block.spec, path, block.shape, block.arrays, options)
    if choice == "keep":
        return None
    scales = "bfloat16" if path == "embed" else "float16"  # rows of unused tokens are tiny
    spec = Spec(_BITS[choice or "int8"], math.gcd(GROUP, block.shape[1]), scales, "rows")
    return _arranged(spec, path, block.shape, (), options)


def _arranged(spec: Spec, path: str, shape: tuple[int, int], fields: Container[str], options: Options) -> Spec:
    """`spec` in the layout that a leaf is to have."""
    if options.layout is None and not is_table(path):
        return spec.for_kernels(shape, fields)
    return dataclasses.replace(spec, layout="rows" if is_table(path) else options.layout)


def _option(path: str) -> str | None:
    """The option that is about a leaf of the model, if there is one."""
    if path in ("lm_head", "draft_head"):
        return "head"
    if path == "embed":
        return "embedding"
    if not _is_linear(path):
        return None
    return "mtp" if path.startswith("mtp.") else "body"


def _is_linear(path: str) -> bool:
    return path.rpartition(".")[2] in _LINEARS


def _file(name: str) -> str:
    """The shard that a piece is in: its layer's, or that of the part of the model that it belongs to."""
    part, _, rest = name.partition(".")
    layer = rest.partition(".")[0]
    return f"{part}-{int(layer):03d}.safetensors" if layer.isdigit() else f"{part}.safetensors"


def _by_file(pieces: list[Piece]) -> dict[str, list[Piece]]:
    files: dict[str, list[Piece]] = {}
    for piece in pieces:
        files.setdefault(_file(piece.name), []).append(piece)
    return files


def _make(pieces: list[Piece]) -> tuple[list[NewTensor], dict[str, dict]]:
    """The tensors of a shard and their records."""
    made = [piece.make() for piece in pieces]
    return [t for tensors, _ in made for t in tensors], {k: v for _, about in made for k, v in about.items()}


def _config(hf_config: dict[str, Any], prefix: str, pieces: list[Piece]) -> dict[str, Any]:
    config = copy.deepcopy(hf_config)
    config.pop("quantization_config", None)
    weights = {leaf_of(piece.name): piece.target for piece in pieces if piece.target}
    config[KEY] = Native(prefix, weights).to_hf()
    return config


def _inputs(directory: Path, account: Account | DrafterAccount) -> dict[str, Path]:
    """config.json and the files with tensors that are used."""
    used = {tensor.path for stored in account.stored.values() for tensor in stored.parts.values()}
    return {path.name: path for path in (directory / "config.json", *sorted(used))}


def _checksum(path: Path, advance: Callable[[int], object]) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            size += len(piece)
            advance(len(piece))
    return {"bytes": size, "sha256": digest.hexdigest()}
