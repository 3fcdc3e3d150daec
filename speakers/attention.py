"""Sampling several texts for one prompt without a copy of the prompt's cache for each of them.

In an 8B Llama, the keys and values of 256 samples' prompts of 2,048 tokens would take 69 GB; with
16 samples to a prompt, those of the 16 prompts take 4.3 GB, which each decoding step reads once.

The attention of a new token runs over the prompt's tokens and over those that its sample has
written so far. `SharedPrompts` keeps the two apart: one cache with a row for each prompt, one with
a row for each sample. `shared_prompts_attention` computes the scores against both, takes one
softmax over them together, and adds up both weighted sums of values. For the part against the
prompt, the queries of all samples of a prompt are stacked as if they were one longer query, so that
a single matrix product reads the prompt's keys once for all of them.

Letters in shapes: G prompts, R rows (samples in the batch), n samples for each prompt, H heads of
keys, Q heads of queries for each head of keys, P prompt tokens, T own tokens, D size of a head.
"""

import torch
import transformers

# types of models that compute with keys and values of the cache before their attention does
COMPUTE_WITH_CACHED = ("diffllama", "doge", "jetmoe")


def share_prompts(model, cache, n):
    """A cache with n samples for each row of `cache`, which holds the prompts."""
    from transformers.masking_utils import sdpa_mask

    # The attention below handles plain keys and values only. These models get a copy of the
    # prompt's cache for each sample: those with latent keys and values, those with an attention of
    # their own, and those that run eager, for example because of sinks or soft caps.
    latent = hasattr(model.config.get_text_config(), "kv_lora_rank")
    own = not model._supports_attention_backend or model.config.model_type in COMPUTE_WITH_CACHED
    if latent or own or model.config._attn_implementation == "eager":
        cache.batch_repeat_interleave(n)
        return cache
    transformers.AttentionInterface.register("shared_prompts", shared_prompts_attention)
    transformers.AttentionMaskInterface.register("shared_prompts", sdpa_mask)
    model.set_attn_implementation("shared_prompts")
    return SharedPrompts(cache, n)


class SharedPrompts:
    """A cache of R rows, as transformers sees it: one for each sample that is still being written.

    Inside are two caches: `prompts` has a row for each of G prompts, (G, H, P, D) in each layer,
    and `samples` a row for each sample, (R, H, T, D). For stacking, each prompt has n slots, and
    slots[r] = n g + i says that row r is the i-th sample of prompt g. Samples that have ended leave
    `samples`, and their slots stay empty; a prompt without samples leaves `prompts`.
    """

    is_initialized = True  # the prompts were read

    def __init__(self, prompts, n):
        self.prompts, self.samples, self.n = prompts, transformers.DynamicCache(), n
        keys = prompts.layers[0].keys
        self.prompt_length = keys.shape[2]
        self.slots = torch.arange(len(keys) * n, device=keys.device)  # (R,)

    # What transformers asks of a cache

    def get_seq_length(self, layer_idx=0):
        return self.prompt_length + self.samples.get_seq_length(layer_idx)

    get_query_offset = get_seq_length

    def get_mask_sizes(self, *query):
        length, offset = self.samples.get_mask_sizes(*query)
        return self.prompt_length + length, offset

    def update(self, keys, values, layer_idx, *_, **__):
        """Store a step's keys and values; return all that this layer attends to.

        It comes in two tuples, as `shared_prompts_attention` takes them.
        """
        keys, values = self.samples.update(keys, values, layer_idx)
        prompts = self.prompts.layers[layer_idx]
        return (prompts.keys, keys), (prompts.values, values, self)

    def batch_select_indices(self, rows):
        """Keep only these samples, and only the prompts that still have one."""
        self.samples.batch_select_indices(rows)
        slots = self.slots[rows]
        kept, new_index = (slots // self.n).unique(return_inverse=True)
        self.slots = new_index * self.n + slots % self.n
        self.prompts.batch_select_indices(kept)

    # From rows to prompts and back

    def stack_samples(self, rows):
        """(R, H, Q, X) -> (G, H, n Q, X): a prompt's samples side by side; empty slots are 0."""
        num_prompts = len(self.prompts.layers[0].keys)
        table = rows.new_zeros(num_prompts * self.n, *rows.shape[1:])
        table = table.index_copy(0, self.slots, rows)  # (G n, H, Q, X)
        return table.unflatten(0, (num_prompts, self.n)).transpose(1, 2).flatten(2, 3)

    def unstack_samples(self, stacked):
        """(G, H, n Q, X) -> (R, H, Q, X)"""
        table = stacked.unflatten(2, (self.n, -1)).transpose(1, 2).flatten(0, 1)  # (G n, H, Q, X)
        return table[self.slots]


def shared_prompts_attention(module, query, key, value, attention_mask, scaling=None, **options):
    """The attention of the next token of each sample: query (R, H Q, 1, D) -> (R, 1, H Q, D)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if isinstance(key, torch.Tensor):  # an ordinary cache: whole prompts are being read
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options)
    prompt_keys, own_keys = key
    prompt_values, own_values, cache = value
    query = query.squeeze(2).unflatten(1, (own_keys.shape[1], -1)) * scaling  # (R, H, Q, D)

    query = query.float()  # bf16 scores would be wrong by 1 % after the softmax
    prompt_scores = cache.unstack_samples(cache.stack_samples(query) @ prompt_keys.mT.float())
    scores = torch.cat([prompt_scores, query @ own_keys.mT.float()], -1)  # (R, H, Q, P + T)
    if attention_mask is not None:  # (R, 1, 1, P + T)
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    weights = scores.softmax(-1).to(own_values)

    prompt_weights, own_weights = weights.split([prompt_keys.shape[2], own_keys.shape[2]], -1)
    from_prompt = cache.unstack_samples(cache.stack_samples(prompt_weights) @ prompt_values)
    output = from_prompt + own_weights @ own_values  # (R, H, Q, D)
    return output.flatten(1, 2)[:, None], None
