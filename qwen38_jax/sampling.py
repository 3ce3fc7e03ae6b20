"""From target logits to tokens: pure, jit-able, and independent of a request's neighbours and of its slot.

`process_logits` yields the log-probabilities that are sampled from (a point mass for a greedy row), so that
plain sampling and speculative verification read one and the same distribution. All is fp32 and over the last
axis: logits are `[B, V]` in a plain step, `[B, L, V]` in a verify block; parameters are per request, `[B]`.

Order: padded vocabulary, logit bias, stop ids before `min_new_tokens`, penalties, temperature, top-k, top-p,
min-p (the last four as in Hugging Face transformers). Of equal logits the lowest id comes first everywhere,
so top-k keeps exactly k.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from qwen38_jax.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_IDS, SamplingParams

# Purposes of a random draw. Each (request, position, purpose) has its own key: noise shared by the draft and
# the residual draw would bias the output. TARGET is the plain draw, and the bonus token of an accepted block.
DRAFT, ACCEPT, RESIDUAL, TARGET = range(4)

# A top-k up to this is found without sorting the vocabulary (Qwen3.8's generation_config: top_k 20).
CANDIDATES = 64


@struct.dataclass
class SamplerState:
    """The sampling parameters of B requests and what they have emitted, one row a request.

    Every leaf has the leading axis B, so a new request enters a slot by
    `jax.tree.map(lambda rows, row: rows.at[slot].set(row[0]), state, state_of_one)`.
    """

    temperature: Array  # [B] fp32; 0 is greedy
    top_k: Array  # [B] int32; 0 is off
    top_p: Array  # [B] fp32
    min_p: Array  # [B] fp32
    repetition_penalty: Array  # [B] fp32
    presence_penalty: Array  # [B] fp32
    frequency_penalty: Array  # [B] fp32
    min_new_tokens: Array  # [B] int32
    bias_ids: Array  # [B, MAX_LOGIT_BIASES] int32, padded with V, which scatters drop
    bias_values: Array  # [B, MAX_LOGIT_BIASES] fp32
    stop_ids: Array  # [B, MAX_STOP_IDS + end-of-text ids] int32, padded with V
    key_data: Array  # [B, 2] uint32, threefry2x32
    output_counts: Array  # [B, V] int32, how often each id was emitted
    prompt_seen: Array  # [B, V] bool, whether the prompt holds the id
    real_vocab_size: int = struct.field(pytree_node=False)  # ids from here to V are padding


def sampler_state(
    requests: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    real_vocab_size: int,
    eos_ids: Sequence[int],
) -> SamplerState:
    """The state of `requests` before their first token.

    Fill an idle slot with `SamplingParams(temperature=0, seed=0)` and an empty prompt: a batch that is greedy
    throughout skips every filter, and an idle row must not be what prevents it.

    Args:
        requests: B requests, each with a seed (where it is None, draw one and `dataclasses.replace` it).
        prompts: their token ids.
        vocab_size: V, the last axis of the logits.
        real_vocab_size: ids from here to V are padding and never sampled.
        eos_ids: the model's end-of-text ids.

    Raises:
        ValueError: an id outside [0, V), a missing seed, or a request that bans every id.
    """
    if len(requests) != len(prompts):
        raise ValueError(f"sampler_state needs a prompt a request, got {len(prompts)} for {len(requests)}")
    shape = (len(requests), vocab_size)
    bias_ids = np.full((len(requests), MAX_LOGIT_BIASES), vocab_size, np.int32)
    bias_values = np.zeros(bias_ids.shape, np.float32)
    stop_ids = np.full((len(requests), MAX_STOP_IDS + len(eos_ids)), vocab_size, np.int32)
    prompt_seen = np.zeros(shape, bool)
    for row, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        _check_request(request, prompt, vocab_size, real_vocab_size, eos_ids)
        for entry, (token, value) in enumerate(request.logit_bias):
            bias_ids[row, entry], bias_values[row, entry] = token, value
        stop = request.stop_ids(eos_ids)
        stop_ids[row, : len(stop)] = stop
        prompt_seen[row, np.asarray(prompt, np.int64)] = True

    def per_request(value: Callable[[SamplingParams], Any], dtype: Any) -> Array:
        return jnp.asarray(np.array([value(request) for request in requests], dtype))

    return SamplerState(
        temperature=per_request(lambda r: 0.0 if r.greedy else r.temperature, np.float32),
        top_k=per_request(lambda r: r.top_k if r.top_k < vocab_size else 0, np.int32),
        top_p=per_request(lambda r: r.top_p, np.float32),
        min_p=per_request(lambda r: r.min_p, np.float32),
        repetition_penalty=per_request(lambda r: r.repetition_penalty, np.float32),
        presence_penalty=per_request(lambda r: r.presence_penalty, np.float32),
        frequency_penalty=per_request(lambda r: r.frequency_penalty, np.float32),
        min_new_tokens=per_request(lambda r: r.min_new_tokens, np.int32),
        bias_ids=jnp.asarray(bias_ids),
        bias_values=jnp.asarray(bias_values),
        stop_ids=jnp.asarray(stop_ids),
        # Written out: jax.random.key(seed) would drop the high word unless 64-bit types are enabled.
        key_data=per_request(lambda r: (r.seed >> 32, r.seed & 0xFFFFFFFF), np.uint32),
        output_counts=jnp.zeros(shape, jnp.int32),
        prompt_seen=jnp.asarray(prompt_seen),
        real_vocab_size=real_vocab_size,
    )


def _check_request(
    request: SamplingParams,
    prompt: Sequence[int],
    vocab_size: int,
    real_vocab_size: int,
    eos_ids: Sequence[int],
) -> None:
    request.validate_ids(vocab_size)
    for name, ids in (("prompt", np.asarray(prompt)), ("eos_ids", np.asarray(eos_ids))):
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if outside.size:
            raise ValueError(f"{name} id must be in [0, {vocab_size - 1}], got {outside[0]}")
    if request.seed is None:
        raise ValueError("seed is None: draw one for the request before it enters the batch")
    banned = {token for token, value in request.logit_bias if value == -np.inf}
    if request.min_new_tokens:
        banned.update(request.stop_ids(eos_ids))
    if sum(token < real_vocab_size for token in banned) == real_vocab_size:
        raise ValueError("logit_bias and min_new_tokens together ban every id: leave at least one to sample")


# --- From logits to the distribution ---


def process_logits(logits: Array, sampler: SamplerState, generated: Array, drafted: Array | None = None) -> Array:
    """The log-probabilities that each row samples from.

    Args:
        logits: [B, V] or, for a verify block, [B, L, V]; any float type. NaN and +inf count as -inf: a broken
            entry costs one id. A row without a finite entry comes out as NaN unless it is greedy.
        sampler: B requests.
        generated: [B] or [B, L] int32, how many tokens the request has emitted before the row's token.
        drafted: [B, L, D] int32 or None, the drafts that the row's token follows, for the penalties: in a
            chain row l has the block's tokens 1..l, in a tree its path. Padded with any id outside [0, V).
            The anchor does not belong here, it is in `sampler.output_counts` already.

    Returns:
        fp32, shaped as `logits`: normalised log-probabilities, -inf for what cannot be sampled. A greedy row
        is 0 at its argmax (of equal logits the lowest id) and -inf elsewhere.

    Raises:
        ValueError: shapes that do not belong together.
    """
    if logits.shape[:-1] != generated.shape or logits.shape[-1] != sampler.output_counts.shape[-1]:
        raise ValueError(
            f"logits {logits.shape} need generated {logits.shape[:-1]} (got {generated.shape}) "
            f"and a sampler over {logits.shape[-1]} ids (got {sampler.output_counts.shape[-1]})"
        )
    if drafted is not None and (drafted.ndim != 3 or drafted.shape[:2] != logits.shape[:-1]):
        raise ValueError(f"drafted must be [B, L, D] for logits [B, L, V], got {drafted.shape} for {logits.shape}")
    with jax.named_scope("process_logits"):
        logits = mask_padding(logits, sampler.real_vocab_size)
        logits = add_bias(logits, sampler)
        logits = mask_stop_ids(logits, sampler, generated)
        logits = penalise(logits, sampler, drafted)
        greedy = _per_row(sampler.temperature == 0, logits)
        point_mass = jnp.where(_ids(logits) == jnp.argmax(logits, axis=-1, keepdims=True), 0.0, -jnp.inf)
        return lax.cond(
            jnp.all(greedy),
            lambda: point_mass,
            lambda: jnp.where(greedy, point_mass, _sampled_log_probs(logits, sampler)),
        )


def mask_padding(logits: Array, real_vocab_size: int) -> Array:
    """Logits [..., V] in fp32, -inf for the padded tail, NaN and +inf (a NaN would win every argmax)."""
    logits = logits.astype(jnp.float32)
    return jnp.where((_ids(logits) < real_vocab_size) & (logits < jnp.inf), logits, -jnp.inf)


def add_bias(logits: Array, sampler: SamplerState) -> Array:
    """Logits [B, ..., V] plus each request's logit bias."""

    def biased():
        batch, vocab_size = sampler.output_counts.shape
        bias = jnp.zeros((batch, vocab_size), jnp.float32)
        bias = bias.at[jnp.arange(batch)[:, None], sampler.bias_ids].set(sampler.bias_values, mode="drop")
        return logits + _per_row(bias, logits)

    return lax.cond(jnp.any(sampler.bias_ids < logits.shape[-1]), biased, lambda: logits)


def mask_stop_ids(logits: Array, sampler: SamplerState, generated: Array) -> Array:
    """Logits [B, ..., V], -inf for the stop ids where generated [B, ...] is below the request's minimum."""
    too_early = (generated < _per_row(sampler.min_new_tokens, generated))[..., None]

    def masked():
        batch, vocab_size = sampler.output_counts.shape
        stops = jnp.zeros((batch, vocab_size), bool)
        stops = stops.at[jnp.arange(batch)[:, None], sampler.stop_ids].set(True, mode="drop")
        return jnp.where(_per_row(stops, logits) & too_early, -jnp.inf, logits)

    return lax.cond(jnp.any(too_early), masked, lambda: logits)


def penalise(logits: Array, sampler: SamplerState, drafted: Array | None = None) -> Array:
    """Logits [B, ..., V] after the repetition (prompt and output), presence and frequency (output) penalties.

    drafted: [B, L, D] int32 or None, see `process_logits`.
    """
    repetition = _per_row(sampler.repetition_penalty, logits)
    presence = _per_row(sampler.presence_penalty, logits)
    frequency = _per_row(sampler.frequency_penalty, logits)

    def penalised():
        counts = _per_row(sampler.output_counts, logits)
        if drafted is not None:
            b, row = jnp.arange(logits.shape[0])[:, None, None], jnp.arange(logits.shape[1])[:, None]
            ids = _or_dropped(drafted, logits.shape[-1])
            counts = jnp.broadcast_to(counts, logits.shape).at[b, row, ids].add(1, mode="drop")
        emitted = counts > 0
        repeated = jnp.where(logits < 0, logits * repetition, logits / repetition)
        seen = emitted | _per_row(sampler.prompt_seen, logits)
        return jnp.where(seen, repeated, logits) - presence * emitted - frequency * counts

    needed = jnp.any((repetition != 1) | (presence != 0) | (frequency != 0))
    return lax.cond(needed, penalised, lambda: logits)


def _sampled_log_probs(logits: Array, sampler: SamplerState) -> Array:
    """Temperature, filters, normalisation. Greedy rows switch no filter on; their result is not used."""
    temperature = _per_row(sampler.temperature, logits)
    sampled = temperature > 0
    top_k = jnp.where(sampled, _per_row(sampler.top_k, logits), 0)
    top_p = jnp.where(sampled, _per_row(sampler.top_p, logits), 1)
    logits = apply_temperature(logits, jnp.where(sampled, temperature, 1))
    logits = filter_top_k_top_p(logits, top_k, top_p)
    logits = filter_min_p(logits, _per_row(sampler.min_p, logits))
    return jax.nn.log_softmax(logits, axis=-1)


def apply_temperature(logits: Array, temperature: Array) -> Array:
    """Logits [..., V], shifted to a maximum of 0, over temperature [..., 1] > 0.

    Shifted first: at a low temperature the quotients are large and their differences would lose digits.
    """
    return (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature


def filter_top_k_top_p(logits: Array, top_k: Array, top_p: Array) -> Array:
    """Logits [..., V], -inf for all but the top_k [..., 1] highest and, of those, all but the shortest head
    whose probability reaches top_p [..., 1]; at least one is kept. top_k 0 and top_p 1 are off.

    What is kept is a head of the order (logit descending, id ascending), so one cutoff entry describes it. A
    row whose top_k fits in CANDIDATES finds it without a sort. Any other makes the whole batch sort, but rows
    of the first kind do not read that, so that no result depends on a neighbour.
    """
    candidates = min(CANDIDATES, logits.shape[-1])
    few = (top_k > 0) & (top_k <= candidates)
    filtered = (top_k > 0) | (top_p < 1)
    logits = jnp.where(logits == 0, 0.0, logits)  # lax.top_k would put -0.0 after 0.0 whatever their ids

    def cutoff_by_sort():
        descending, ids = lax.sort((-logits, _ids(logits)), dimension=-1, num_keys=1, is_stable=True)
        return _cutoff(-descending, ids, top_k, top_p)

    def masked():
        value, token = _cutoff(*lax.top_k(logits, candidates), top_k, top_p)
        sorted_value, sorted_token = lax.cond(
            jnp.any(filtered & ~few), cutoff_by_sort, lambda: (jnp.zeros_like(value), jnp.zeros_like(token))
        )
        value, token = jnp.where(few, value, sorted_value), jnp.where(few, token, sorted_token)
        kept = (logits > value) | ((logits == value) & (_ids(logits) <= token))
        return jnp.where(kept | ~filtered, logits, -jnp.inf)

    return lax.cond(jnp.any(filtered), masked, lambda: logits)


def _cutoff(logits: Array, ids: Array, top_k: Array, top_p: Array) -> tuple[Array, Array]:
    """Logit and id, each [..., 1], of the last entry that top_k [..., 1] and top_p [..., 1] keep.

    logits [..., K] are the K highest of a row, descending; ids [..., K] are theirs.
    """
    in_top_k = (jnp.arange(logits.shape[-1]) < top_k) | (top_k == 0)
    weight = jnp.where(in_top_k, jnp.exp(logits - logits[..., :1]), 0.0)
    before = jnp.cumsum(weight, axis=-1) - weight
    in_top_p = before < top_p * jnp.sum(weight, axis=-1, keepdims=True)
    kept = in_top_k & (in_top_p | (top_p >= 1))  # a rounded sum must not cut the tail off when top-p is off
    last = jnp.maximum(jnp.sum(kept, axis=-1, keepdims=True) - 1, 0)
    return jnp.take_along_axis(logits, last, axis=-1), jnp.take_along_axis(ids, last, axis=-1)


def filter_min_p(logits: Array, min_p: Array) -> Array:
    """Logits [..., V], -inf where the probability is under min_p [..., 1] times the highest one."""
    return jnp.where(jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)) >= min_p, logits, -jnp.inf)


# --- From the distribution to tokens ---


def row_keys(key_data: Array, positions: Array, purpose: Array | int) -> Array:
    """Typed keys shaped as positions [B, ...]: the request's key (key_data [B, 2]) folded with the absolute
    position of the token to be drawn, then with the purpose of the draw, one for all or shaped as positions."""
    data = jnp.broadcast_to(_per_row(key_data, positions[..., None]), (*positions.shape, 2)).reshape(-1, 2)
    keys = jax.random.wrap_key_data(data, impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in)(keys, positions.reshape(-1))
    purposes = jnp.broadcast_to(purpose, positions.shape).reshape(-1)
    return jax.vmap(jax.random.fold_in)(keys, purposes).reshape(positions.shape)


def sample(log_probs: Array, sampler: SamplerState, positions: Array, purpose: Array | int = TARGET) -> Array:
    """Tokens [B, ...] int32 drawn from log_probs [B, ..., V], which need not be normalised.

    positions: [B, ...] int32, the absolute position that each token will have. A point mass yields its token
    whatever the noise; a batch that is greedy throughout takes the argmax and draws no noise.
    """

    def drawn():
        keys = row_keys(sampler.key_data, positions, purpose).reshape(-1)
        tokens = jax.vmap(jax.random.categorical)(keys, log_probs.reshape(-1, log_probs.shape[-1]))
        return tokens.reshape(positions.shape).astype(jnp.int32)

    with jax.named_scope("sample"):
        all_greedy = jnp.all(sampler.temperature == 0)
        return lax.cond(all_greedy, lambda: jnp.argmax(log_probs, axis=-1).astype(jnp.int32), drawn)


def update_counts(sampler: SamplerState, tokens: Array, active: Array) -> SamplerState:
    """The state after tokens [B] or [B, L] int32 were emitted, only where active (bool, same shape)."""
    batch, vocab_size = sampler.output_counts.shape
    ids = _or_dropped(jnp.where(active, tokens, vocab_size), vocab_size)
    rows = _per_row(jnp.arange(batch), ids)
    return sampler.replace(output_counts=sampler.output_counts.at[rows, ids].add(1, mode="drop"))


def token_logprobs(logits: Array, tokens: Array, top: int, *, real_vocab_size: int) -> tuple[Array, Array, Array]:
    """What the model itself gave the chosen tokens and the likeliest ones: as OpenAI defines `logprobs`,
    before bias, penalties, temperature and filters.

    Args:
        logits: [..., V], raw target logits, any float type.
        tokens: [...] int32 in [0, V).
        top: how many of the likeliest to list, static, at most `real_vocab_size`.
        real_vocab_size: ids from here to V are padding and get -inf.

    Returns:
        log-probability of each token [...] fp32; ids of the likeliest [..., top] int32, best first; their
        log-probabilities [..., top] fp32.

    Raises:
        ValueError: `top` out of range.
    """
    if not 0 <= top <= real_vocab_size:
        raise ValueError(f"top must be in [0, {real_vocab_size}], got {top}")
    log_probs = jax.nn.log_softmax(mask_padding(logits, real_vocab_size), axis=-1)
    chosen = jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]
    top_log_probs, top_ids = lax.top_k(log_probs, top)
    return chosen, top_ids, top_log_probs


def _ids(logits: Array) -> Array:
    """The token id of every entry of logits [..., V], int32."""
    return lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)


def _per_row(values: Array, like: Array) -> Array:
    """values [B, ...] with as many axes as `like`; the new ones, of size 1, follow the batch axis."""
    return jnp.expand_dims(values, range(1, 1 + like.ndim - values.ndim))


def _or_dropped(ids: Array, vocab_size: int) -> Array:
    """ids, the negative ones moved out of range: for a scatter -1 is the last id, not one to drop."""
    return jnp.where(ids < 0, vocab_size, ids)
