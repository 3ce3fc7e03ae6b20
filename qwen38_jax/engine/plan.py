"""How much memory a run needs, part by part, told from shapes before anything is allocated."""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp

from qwen38_jax import decode, speculative
from qwen38_jax.checkpoint import names, synthetic
from qwen38_jax.checkpoint.accounting import Account, Assignment, read_by_kernels, weight_bytes
from qwen38_jax.checkpoint.drafter import DrafterAccount
from qwen38_jax.config import DFlash2Config, ModelConfig
from qwen38_jax.drafters.dflash2 import DFlash2
from qwen38_jax.drafters.interface import Drafter
from qwen38_jax.drafters.lookup import NoDrafter
from qwen38_jax.drafters.mtp import Mtp
from qwen38_jax.engine.memory import Budget, NotEnoughMemory
from qwen38_jax.layers.gated_delta_net import CHUNK
from qwen38_jax.params import Params, shapes, tree_bytes
from qwen38_jax.quantization import QuantTensor
from qwen38_jax.sampling import sampler_state
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.spec_config import SpecConfig
from qwen38_jax.state import StateConfig, abstract_state, capacity_for

DRAFTERS = ("mtp", "dflash2", "lookup")

# Lengths a prompt is cut into, a program for each; the last piece is padded to the shortest that holds it.
PREFILL_CHUNKS = (16, 64, 256, 1024)
# Rows of all sequences that are read at a time: enough to keep a GPU busy, and a bound to what that takes.
_PREFILL_ROWS = 2048

_PARTS = {
    "gated_delta_net": "Gated DeltaNet",
    "attention": "attention",
    "mlp": "MLP",
    "norms": "norms",
    "embed": "embedding",
    "head": "output head",
    "mtp": "MTP head",
}


@dataclasses.dataclass(frozen=True)
class Item:
    """A line of the table; `detail` says in which format, or how much of what."""

    part: str
    name: str
    detail: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Weights:
    """What is resident whatever is asked for, and what of it decides about the rest.

    Attributes:
      head_dequantised: whether the output head is in integers that no kernel reads, and so dequantised for every use.
      drafter: the configuration of a DFlash2 drafter that is loaded as well.
    """

    cfg: ModelConfig
    items: tuple[Item, ...]
    head_dequantised: bool
    drafter: DFlash2Config | None = None

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    @classmethod
    def of_params(cls, params: Params, cfg: ModelConfig, drafter: Drafter | None = None) -> "Weights":
        """Of parameters that are in memory already, and of what a drafter has beside them."""
        head = params.embed if params.lm_head is None else params.lm_head
        items = [Item("weights", "parameters", cfg.dtype, tree_bytes(params))]
        if nbytes := tree_bytes(drafter):
            items.append(Item("weights", "drafter", cfg.dtype, nbytes))
        dequantised = isinstance(head, QuantTensor) and head.layout == "rows"
        return cls(cfg, tuple(items), dequantised, drafter.cfg if isinstance(drafter, DFlash2) else None)

    @classmethod
    def of_accounts(
        cls, account: Account, drafter: DrafterAccount | None = None, draft_vocab: int | None = None
    ) -> "Weights":
        """Of what a checkpoint's headers (and those of a DFlash2 drafter) say.

        Args:
          draft_vocab: rows of the output head that are copied for the MTP head to draft from; None copies none.

        Raises:
          ValueError: the drafter was made for another model.
        """
        if drafter is not None:
            drafter.cfg.check_target(account.cfg)
        items = _weight_items(account, _model_part)
        if account.draft_place is not None:
            items.append(Item("weights", "draft head", "int32 ids", 4 * account.draft_place.shape[0]))
        if drafter is not None:
            items += _weight_items(drafter, lambda name: "DFlash2 drafter")
        head = account.stored[names.EMBED if account.cfg.tie_word_embeddings else names.HEAD]
        if draft_vocab is not None:
            row = weight_bytes(head, account.cfg.dtype) // account.cfg.vocab_size
            items.append(Item("weights", "draft vocabulary", "rows of the head, ids", draft_vocab * (row + 4)))
        table = account.cfg.tie_word_embeddings  # which is looked up as well, and so not packed for kernels
        dequantised = head.bits > 0 and (table or not read_by_kernels(head))
        return cls(account.cfg, tuple(items), dequantised, drafter.cfg if drafter else None)


def _weight_items(account: Assignment, part_of: Callable[[str], str]) -> list[Item]:
    """The bytes of all weights, by part and by how they are held."""
    sizes: Counter[tuple[str, str]] = Counter()
    for place in account.places:
        for name in place.names:
            stored, dtype = account.stored[name], place.info.dtype
            sizes[part_of(name), stored.label if stored.bits else dtype] += weight_bytes(stored, dtype)
    return [Item("weights", part, held, nbytes) for (part, held), nbytes in sizes.items()]


def _model_part(name: str) -> str:
    return "draft head" if name == names.DRAFT_HEAD else _PARTS[names.layer_class(names.parse(name))]


def chunk_lengths(tokens: int, slots: int) -> list[int]:
    """Lengths of the pieces, the longest first, that prompts of up to so many tokens are read in, `slots` at a time."""
    allowed = [n for n in PREFILL_CHUNKS if n * slots <= _PREFILL_ROWS] or [PREFILL_CHUNKS[0]]
    lengths: list[int] = []
    while tokens > 0:
        lengths.append(next((n for n in allowed if n >= tokens), allowed[-1]))
        tokens -= lengths[-1]
    return lengths


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run asks for.

    Attributes:
      slots: sequences that are decoded together.
      context: tokens of each, prompt and answer.
      prompt: the longest prompt; None for as long as the context.
      state_dtype: of the recurrent state.
      drafters: some of `DRAFTERS`.
      verify_rows: of the largest verify block, the anchor and the drafts; 0 where there are no drafts.
      logit_rows: rows of each sequence that logits are wanted for at a time.

    Raises:
      ValueError: a number is out of range, or drafters and verify rows contradict each other.
    """

    slots: int = 1
    context: int = 8192
    prompt: int | None = None
    state_dtype: str = "float32"
    drafters: tuple[str, ...] = ()
    verify_rows: int = 0
    logit_rows: int = 1

    def __post_init__(self):
        for name in ("slots", "context", "logit_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if unknown := sorted(set(self.drafters) - set(DRAFTERS)):
            raise ValueError(f"there is no drafter {unknown[0]!r}; known: {', '.join(DRAFTERS)}")
        if {"mtp", "dflash2"} <= set(self.drafters):
            raise ValueError("MTP and DFlash2 do not draft together: choose one, with or without lookup")
        if bool(self.drafters) != bool(self.verify_rows):
            raise ValueError("drafters and verify_rows go together: drafts need a block to be verified in")
        if self.verify_rows and not 2 <= self.verify_rows <= CHUNK:
            raise ValueError(f"verify_rows must be 2 (the anchor and a draft) to {CHUNK}, got {self.verify_rows}")

    def sizes(self, cfg: ModelConfig) -> StateConfig:
        """The state that is set up: powers of two, so that few programs serve all sizes."""
        capacity = capacity_for(min(self.context, cfg.max_position_embeddings))
        slots = 1 << (self.slots - 1).bit_length()
        return StateConfig(slots, capacity, self.verify_rows, recurrent_dtype=self.state_dtype)

    def prefill_rows(self, cfg: ModelConfig) -> int:
        """Rows of each sequence that are read at a time."""
        sizes = self.sizes(cfg)
        longest = sizes.capacity if self.prompt is None else min(self.prompt, sizes.capacity)
        return chunk_lengths(longest, sizes.batch)[0]


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that a run needs."""

    items: tuple[Item, ...]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


def make_plan(weights: Weights, settings: Settings, *, workspace: int | None = None) -> Plan:
    """The plan of a run; `workspace` is what compiled programs take beside arguments and results, None estimates it.

    Raises:
      ValueError: the settings ask for what these weights have not.
    """
    items = [*weights.items, *_state_items(weights, settings)]
    detail = "of the compiled programs"
    if workspace is None:
        rows = f"{settings.sizes(weights.cfg).batch} x {settings.prefill_rows(weights.cfg)}"
        detail = f"estimate: {rows} rows of prefill, a matrix, logits"
        workspace = _workspace_estimate(weights, settings)
    return Plan((*items, Item("workspace", "intermediate results", detail, workspace)))


def _state_items(weights: Weights, settings: Settings) -> Iterator[Item]:
    cfg, sizes = weights.cfg, settings.sizes(weights.cfg)
    if "mtp" in settings.drafters and not cfg.mtp_num_hidden_layers:
        raise ValueError("the checkpoint has no MTP head to draft with")
    if "dflash2" in settings.drafters and weights.drafter is None:
        raise ValueError("drafting with DFlash2 needs a drafter: name its directory")
    state = _abstract_run_state(cfg, sizes, settings.drafters, weights.drafter)
    plain = state.decode if settings.drafters else state
    model = plain.model
    tokens = f"{sizes.batch} x {sizes.capacity:,} tokens"
    slots = f"{sizes.batch} slot{'s' if sizes.batch > 1 else ''}"
    parts = [
        ("KV pages", f"{tokens}, {model.kv.k.dtype}", model.kv),
        ("recurrent state", f"{slots}, {sizes.recurrent_dtype}", model.recurrent),
        ("convolution windows", f"{slots}, {model.conv.dtype}", model.conv),
        ("pending rows", f"{sizes.batch} x {sizes.rows} rows", model.pending),
        ("tables, counts, sampling", slots, (model.block_table, model.lengths, plain.replace(model=None))),
    ]
    if "mtp" in settings.drafters:
        parts.append(("MTP cache", tokens, state.drafter))
    if "dflash2" in settings.drafters:
        window = f"{sizes.batch} x {weights.drafter.sliding_window:,} tokens"
        parts.append(("DFlash2 cache", window, state.drafter))
    if settings.drafters:
        parts.append(("tokens and counts of drafts", tokens, state.replace(decode=None, drafter=None)))
    for name, detail, tree in parts:
        if nbytes := tree_bytes(tree):
            yield Item("state", name, detail, nbytes)


@functools.lru_cache(64)
def _abstract_run_state(cfg: ModelConfig, sizes: StateConfig, drafters: tuple[str, ...], dflash2: DFlash2Config | None):
    """The `DecodeState` of a batch as shapes, or with drafters its `SpeculativeState`."""
    idle = [SamplingParams(temperature=0.0, seed=0)] * sizes.batch
    vocab = cfg.vocab_size

    def begin(model):
        active = jnp.ones(sizes.batch, bool)
        sampler = sampler_state(
            idle, [()] * sizes.batch, vocab_size=vocab, real_vocab_size=vocab, eos_ids=cfg.eos_token_ids
        )
        if not drafters:
            return decode.start(cfg, model, sampler, active)
        drafter = NoDrafter()
        if "mtp" in drafters:
            drafter = Mtp(None, draft_tokens=1)  # how many changes no shape
        elif "dflash2" in drafters:
            drafter = DFlash2(None, dflash2)
        spec = SpecConfig(verify_tokens=sizes.rows - 1, lookup="lookup" in drafters)
        limit = jnp.zeros(sizes.batch, jnp.int32)
        return speculative.start(cfg, drafter, spec, sizes, model, sampler, active, limit)

    return jax.eval_shape(begin, abstract_state(cfg, sizes))


def _workspace_estimate(weights: Weights, settings: Settings) -> int:
    """Intermediate results of the hungriest program; a rough fit to what XLA gives this model's on an NVIDIA GPU.

    For products of many rows matrices are dequantised (dense ones are copied out of their stacks), of a layer up to
    three at a time. Of a row of prefill about two inner rows of the MLP and four recurrent states of its chunk, in
    fp32, are alive at once; of a row of logits four.
    """
    cfg, sizes = weights.cfg, settings.sizes(weights.cfg)
    itemsize = jnp.dtype(cfg.dtype).itemsize
    layer = shapes(cfg).linear
    three = (layer.mixer.out, layer.mlp.gate_up, layer.mlp.down)
    matrices = sum(math.prod(leaf.shape[1:]) for leaf in three) * itemsize
    head = cfg.vocab_size * cfg.hidden_size * itemsize if weights.head_dequantised else 0
    state = cfg.linear_num_value_heads * cfg.linear_key_head_dim * cfg.linear_value_head_dim
    row = 4 * (2 * cfg.intermediate_size + 4 * state // CHUNK)
    if weights.drafter and "dflash2" in settings.drafters:
        row += len(weights.drafter.target_layer_ids) * cfg.hidden_size * itemsize
    rows = sizes.batch * settings.prefill_rows(cfg)
    logits = sizes.batch * max(settings.logit_rows, settings.verify_rows) * cfg.vocab_size * 4
    return max(matrices + rows * row, max(matrices, head) + 4 * logits)


def alternatives(weights: Weights, settings: Settings, budget: Budget) -> list[tuple[str, int]]:
    """What fits in place of a run that does not: changes in words, each with the bytes that the run then needs.

    One thing is changed at a time and no more than it takes; where that is not enough, all of them together; and where
    not even that is, how the weights are stored as well.
    """
    if found := _changes(weights, settings, budget):
        return found
    for words, lighter in _lighter(weights):
        nbytes = make_plan(lighter, settings).nbytes
        if nbytes <= budget.nbytes:
            return [(words, nbytes)]
        if found := _changes(lighter, settings, budget):
            return [(f"{words}, and {change}", nbytes) for change, nbytes in found]
    return []


def _changes(weights: Weights, settings: Settings, budget: Budget) -> list[tuple[str, int]]:
    """Changes of the settings after which these weights' run fits."""

    def first(changes: Iterable[tuple[str, Settings]]) -> list[tuple[str, int]]:
        plans = ((words, make_plan(weights, changed).nbytes) for words, changed in changes)
        return list(itertools.islice((plan for plan in plans if plan[1] <= budget.nbytes), 1))

    found = []
    for change in (_shorter, _fewer, _half_state, _shorter_blocks):
        found += first(change(weights.cfg, settings))
    if not found:
        least = dataclasses.replace(settings, slots=1, state_dtype="float16", drafters=(), verify_rows=0)
        same = f"{least.sizes(weights.cfg).capacity:,} tokens a sequence"
        found = first([(same, least), *_shorter(weights.cfg, least)])
        found = [(f"one sequence at a time, a float16 state, no drafts, {words}", nbytes) for words, nbytes in found]
    return found


def _shorter(cfg: ModelConfig, settings: Settings) -> Iterator[tuple[str, Settings]]:
    capacity = settings.sizes(cfg).capacity // 2
    while capacity == capacity_for(capacity):
        yield f"{capacity:,} tokens a sequence", dataclasses.replace(settings, context=capacity)
        capacity //= 2


def _fewer(cfg: ModelConfig, settings: Settings) -> Iterator[tuple[str, Settings]]:
    slots = settings.sizes(cfg).batch // 2
    while slots:
        yield f"{slots} sequence{'s' if slots > 1 else ''} at a time", dataclasses.replace(settings, slots=slots)
        slots //= 2


def _half_state(_: ModelConfig, settings: Settings) -> Iterator[tuple[str, Settings]]:
    if settings.state_dtype != "float16":
        yield "a float16 recurrent state", dataclasses.replace(settings, state_dtype="float16")


def _shorter_blocks(_: ModelConfig, settings: Settings) -> Iterator[tuple[str, Settings]]:
    if settings.verify_rows > 8:
        yield "verify blocks of 8 rows", dataclasses.replace(settings, verify_rows=8)
    if settings.drafters:
        yield "no drafts", dataclasses.replace(settings, drafters=(), verify_rows=0)


def _lighter(weights: Weights) -> Iterator[tuple[str, Weights]]:
    """The same model as it is published in fewer bits."""
    cfg = weights.cfg
    heads = cfg.num_attention_heads * cfg.head_dim, cfg.linear_num_value_heads * cfg.linear_value_head_dim
    if any(columns % synthetic.GROUP for columns in (cfg.hidden_size, cfg.intermediate_size, *heads)):
        return
    for stored, words in {"w4a16": "int4 layers", "fast": "int4 layers and heads, an int8 embedding"}.items():
        lighter = Weights.of_accounts(synthetic.account(synthetic.stored_as(stored, cfg)))
        if lighter.nbytes < weights.nbytes:
            yield f"a checkpoint with {words}", lighter


def require_fit(
    weights: Weights, settings: Settings, budget: Budget | None, what: str, *, workspace: int | None = None
) -> None:
    """Raises NotEnoughMemory, with both numbers and with what would fit, if a run does not fit."""
    plan = make_plan(weights, settings, workspace=workspace)
    if budget is None or plan.nbytes <= budget.nbytes:
        return
    parts: Counter[str] = Counter()
    for item in plan.items:
        parts[item.part] += item.nbytes
    listed = ", ".join(f"{part} {nbytes / 2**30:.2f}" for part, nbytes in parts.items())
    found = alternatives(weights, settings, budget)
    fitting = "; or ".join(f"{words} ({nbytes / 2**30:.2f} GiB)" for words, nbytes in found)
    raise NotEnoughMemory(
        f"{what} needs {plan.nbytes / 2**30:.2f} GiB ({listed}), but {budget.source} leaves "
        f"{budget.nbytes / 2**30:.2f} GiB. What fits: {fitting or 'nothing of this model; free memory'}"
    )
