"""Tiny models of many transformers families, made from configs in seconds: what is captured, and what cannot be.

One registry for tools/model_table.py, which writes docs/models.md, and for the tests.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Inputs = dict[str, Tensor]

SAMPLES, LENGTH, TARGETS, VOCABULARY = 3, 8, 6, 99


def padded_mask(length: int = LENGTH) -> Tensor:
    """Right padding: samples of all, of all but three and of two tokens."""
    lengths = torch.tensor([length, length - 3, 2])
    return (torch.arange(length) < lengths[:, None]).long()


def _ids(length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(5, VOCABULARY, (SAMPLES, length), generator=generator)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def text() -> Inputs:
    mask = padded_mask()
    return {"input_ids": _ids() * mask + (1 - mask), "attention_mask": mask}  # 1 is padding


def pair() -> Inputs:
    """Source and target, of different lengths and both padded."""
    mask = padded_mask(TARGETS)
    return text() | {"decoder_input_ids": _ids(TARGETS) * mask + (1 - mask), "decoder_attention_mask": mask}


def image() -> Inputs:
    return {"pixel_values": _normal(SAMPLES, 3, 32, 32)}


def text_and_image() -> Inputs:
    return text() | image()


def sound() -> Inputs:
    """Waves of 400 samples, the last two shorter."""
    lengths = torch.tensor([400, 300, 200])
    mask = (torch.arange(400) < lengths[:, None]).long()
    return {"input_values": _normal(SAMPLES, 400) * mask, "attention_mask": mask}


def _sound_and_text() -> Inputs:
    return sound() | {name: tokens for name, tokens in pair().items() if name.startswith("decoder")}


def text_with(**more: Callable[[], Tensor]) -> Callable[[], Inputs]:
    return lambda: text() | {name: make() for name, make in more.items()}


@dataclass(frozen=True)
class Family:
    """How to make a tiny model of one family, and what is true of its attention."""

    name: str
    group: str
    model: str  # class of transformers
    config: Callable[[], Any]
    inputs: Callable[[], Inputs]
    calls: int = 2  # self-attention calls in one training forward
    cross_calls: int = 0
    refused: str = ""  # why, if it cannot be captured
    note: str = ""
    other_softmaxes: int = 0  # that are no attention, or not one that is captured: `note` says what they are
    masks: Callable[[nn.Module, Inputs], dict[int, Tensor] | None] | None = None  # where they are not those given
    prepare: Callable[[nn.Module], None] = field(default=lambda model: None)

    @property
    def implementations(self) -> tuple[str, ...]:
        """The attention implementations that the class has, of those we can read; the usual one first."""
        return ("sdpa", "eager") if getattr(transformers, self.model)._supports_sdpa else ("eager",)

    def build(self, implementation: str | None = None) -> nn.Module:
        """A model with the same weights at every call, in eval mode. Dropout is as the config says."""
        torch.manual_seed(0)
        config = self.config()
        config._attn_implementation = implementation or self.implementations[0]
        model: nn.Module = getattr(transformers, self.model)(config)
        _spread(model)
        self.prepare(model)
        return model.eval()

    def validity(self, model: nn.Module, inputs: Inputs) -> dict[int, Tensor] | None:
        """Which tokens are valid, [b, n], by their number n; None where that is hard to tell from outside."""
        if self.masks is not None:
            return self.masks(model, inputs)
        given = [inputs[name].bool() for name in ("attention_mask", "decoder_attention_mask") if name in inputs]
        return {mask.shape[1]: mask for mask in given}


def _spread(model: nn.Module) -> None:
    """Weights large enough for queries and keys to differ: the usual 0.02 leaves nothing to see at width 32."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and parameter.numel() and "norm" not in name.lower():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)


def _config(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        return getattr(transformers, name)(**options)

    return make


# The many spellings of: 2 layers of 4 heads, width 32. A config keeps attributes it does not know, which does no harm.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 2, "eos_token_id": 3}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
PATCHES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "image_size": 32,
    "patch_size": 8,
}
WAVES: dict[str, Any] = SMALL | {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}


def _encoder(name: str, prefix: str, head: str = "Model", *, base: dict[str, Any] = SMALL, **more: Any) -> Family:
    return _text_family("text encoder", name, prefix, head, base, more)


def _decoder(
    name: str, prefix: str, head: str = "ForCausalLM", *, base: dict[str, Any] = GROUPED, **more: Any
) -> Family:
    return _text_family("text decoder", name, prefix, head, base, more)


def _text_family(group: str, name: str, prefix: str, head: str, base: dict[str, Any], more: dict[str, Any]) -> Family:
    known = {key: more.pop(key) for key in list(more) if key in Family.__dataclass_fields__}
    settings = {"inputs": text, "config": _config(f"{prefix}Config", **base | more)} | known
    return Family(**{"name": name, "group": group, "model": prefix + head} | settings)


def _translator(name: str, prefix: str, head: str = "ForConditionalGeneration", **more: Any) -> Family:
    known = {key: more.pop(key) for key in list(more) if key in Family.__dataclass_fields__}
    settings = {"inputs": pair, "calls": 4, "cross_calls": 2, "config": _config(f"{prefix}Config", **SEQ2SEQ | more)}
    return Family(**{"name": name, "group": "encoder-decoder", "model": prefix + head} | settings | known)


def _vision(name: str, prefix: str, head: str = "Model", **more: Any) -> Family:
    known = {key: more.pop(key) for key in list(more) if key in Family.__dataclass_fields__}
    settings = {"inputs": image, "config": _config(f"{prefix}Config", **PATCHES | more)} | known
    return Family(**{"name": name, "group": "vision", "model": prefix + head} | settings)


def _speech(name: str, prefix: str, head: str = "Model", **more: Any) -> Family:
    known = {key: more.pop(key) for key in list(more) if key in Family.__dataclass_fields__}
    settings = {"inputs": sound, "config": _config(f"{prefix}Config", **WAVES | more), "masks": _frames} | known
    return Family(**{"name": name, "group": "speech", "model": prefix + head} | settings)


def _frames(model: Any, inputs: Inputs) -> dict[int, Tensor]:
    """Validity of the frames that the convolutions leave of the waves."""
    teller = next(m for m in model.modules() if hasattr(m, "_get_feat_extract_output_lengths"))
    lengths = teller._get_feat_extract_output_lengths(inputs["attention_mask"].sum(-1))
    count = int(lengths.max())
    frames = {count: torch.arange(count) < lengths[:, None]}
    return frames | _decoder_mask(model, inputs) if "decoder_attention_mask" in inputs else frames


def _encoder_decoder() -> Any:
    encoder = transformers.BertConfig(**SMALL)
    decoder = transformers.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    return config


def _two_towers(prefix: str) -> Callable[[], Any]:
    words = SMALL | {"projection_dim": 16, "bos_token_id": 2, "eos_token_id": 3}
    pictures = PATCHES | {"projection_dim": 16}
    return _config(f"{prefix}Config", text_config=words, vision_config=pictures, projection_dim=16)


def _spectrogram() -> Inputs:
    mask = padded_mask(TARGETS)
    return {
        "input_features": _normal(SAMPLES, 16, 40),
        "decoder_input_ids": _ids(TARGETS) * mask + (1 - mask),
        "decoder_attention_mask": mask,
    }


def _features() -> Inputs:
    return _spectrogram() | {"input_features": _normal(SAMPLES, 40, 16)}


def _decoder_mask(model: nn.Module, inputs: Inputs) -> dict[int, Tensor]:
    return {TARGETS: inputs["decoder_attention_mask"].bool()}


def _text_then(count: int, *, first: bool = False) -> Callable[[nn.Module, Inputs], dict[int, Tensor]]:
    """Padded text with `count` tokens of an image, all valid, behind it or before it."""

    def masks(model: nn.Module, inputs: Inputs) -> dict[int, Tensor]:
        own, ones = inputs["attention_mask"].bool(), torch.ones(SAMPLES, count, dtype=torch.bool)
        return {LENGTH + count: torch.cat([ones, own] if first else [own, ones], 1)}

    return masks


def _squeezed_frames(model: Any, inputs: Inputs) -> dict[int, Tensor]:
    """Every second frame; an odd one at the end of a wave counts."""
    ((count, frames),) = _frames(model, inputs).items()
    return {count // 2: frames[:, : count // 2 * 2 : 2]}


def _source_mask(model: nn.Module, inputs: Inputs) -> dict[int, Tensor]:
    return {LENGTH: inputs["attention_mask"].bool()}


def _unknown(model: nn.Module, inputs: Inputs) -> None:
    return None


def _boxes() -> Tensor:
    return (torch.arange(4) + torch.arange(LENGTH)[:, None]).expand(SAMPLES, LENGTH, 4) * 10


FAMILIES: tuple[Family, ...] = (
    # --- text encoders
    _encoder("BERT", "Bert", "ForSequenceClassification"),
    _encoder(
        "ALBERT", "Albert", "ForSequenceClassification", embedding_size=16, note="one module, called once a layer"
    ),
    _encoder("RoBERTa", "Roberta", "ForSequenceClassification"),
    _encoder("RoBERTa-PreLayerNorm", "RobertaPreLayerNorm"),
    _encoder("XLM-RoBERTa", "XLMRoberta"),
    _encoder("XLM-RoBERTa-XL", "XLMRobertaXL"),
    _encoder("X-MOD", "Xmod", prepare=lambda model: model.set_default_language("en_XX")),
    _encoder("CamemBERT", "Camembert"),
    _encoder("Data2VecText", "Data2VecText"),
    _encoder("DistilBERT", "DistilBert", "ForSequenceClassification", dim=32, hidden_dim=40, n_layers=2, n_heads=4),
    _encoder("ELECTRA", "Electra", embedding_size=16),
    _encoder("ERNIE", "Ernie"),
    _encoder("ModernBERT", "ModernBert", "ForSequenceClassification", local_attention=8),
    _encoder("EuroBERT", "EuroBert", num_key_value_heads=2, mask_token_id=4),
    _encoder("NomicBERT", "NomicBert"),
    _encoder("ESM", "Esm", mask_token_id=4, position_embedding_type="rotary"),
    _encoder("MegatronBERT", "MegatronBert"),
    _encoder("MobileBERT", "MobileBert", embedding_size=16, intra_bottleneck_size=32, true_hidden_size=32),
    _encoder("MPNet", "MPNet", "ForSequenceClassification"),
    _encoder("DeBERTa", "Deberta", "ForSequenceClassification", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _encoder(
        "DeBERTa-v2",
        "DebertaV2",
        "ForSequenceClassification",
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=4,
        share_att_key=True,
    ),
    _encoder(
        "ConvBERT",
        "ConvBert",
        embedding_size=32,
        head_ratio=2,
        num_groups=1,
        other_softmaxes=2,
        note="beside its convolutions, half of the heads",
    ),
    _encoder("SqueezeBERT", "SqueezeBert", embedding_size=32),
    _encoder("RemBERT", "RemBert", input_embedding_size=16, output_embedding_size=16),
    _encoder("RoFormer", "RoFormer", embedding_size=32),
    _encoder(
        "RoCBERT",
        "RoCBert",
        enable_pronunciation=False,
        enable_shape=False,
        shape_vocab_size=9,
        pronunciation_vocab_size=9,
    ),
    _encoder("Splinter", "Splinter"),
    _encoder("LUKE", "Luke", entity_vocab_size=20, entity_emb_size=16, use_entity_aware_attention=False),
    _encoder("TAPAS", "Tapas"),
    _encoder(
        "CANINE",
        "Canine",
        local_transformer_stride=4,
        upsampling_kernel_size=2,
        downsampling_rate=2,
        calls=5,
        masks=_unknown,
        note="characters in local blocks, then tokens",
    ),
    _encoder("I-BERT", "IBert"),
    _encoder(
        "Nystromformer",
        "Nystromformer",
        inputs=lambda: {"input_ids": _ids()},
        num_landmarks=4,
        segment_means_seq_len=8,
        max_position_embeddings=8,
        conv_kernel_size=3,
        refused="approximates attention by landmarks: no product of all its queries and keys exists",
    ),
    _encoder("YOSO", "Yoso", refused="samples its attention by hashing, without a softmax"),
    _encoder("MRA", "Mra", refused="approximates attention in blocks, by kernels of its own"),
    _encoder(
        "Longformer",
        "Longformer",
        attention_window=4,
        refused="attention in overlapping blocks, with other projections for global tokens",
    ),
    _encoder("BigBird", "BigBird", attention_type="original_full", note="attention_type='original_full'"),
    _encoder(
        "BigBird, block-sparse",
        "BigBird",
        attention_type="block_sparse",
        block_size=2,
        num_random_blocks=1,
        inputs=lambda: {"input_ids": _ids(32)},
        refused="no product of all its queries and keys exists",
    ),
    _encoder(
        "Funnel",
        "Funnel",
        base={"vocab_size": VOCABULARY, "pad_token_id": 1},
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=40,
        block_sizes=[1, 1],
        num_decoder_layers=1,
        refused="pools its queries, whose masks then cannot be told",
    ),
    _encoder(
        "XLNet",
        "XLNet",
        base={"vocab_size": VOCABULARY, "pad_token_id": 1},
        d_model=32,
        n_layer=2,
        n_head=4,
        d_inner=40,
        refused="makes queries and keys with bare parameters, which no hook can reach",
    ),
    _encoder("XLM", "XLM", emb_dim=32, n_layers=2, n_heads=4),
    _encoder("FlauBERT", "Flaubert", emb_dim=32, n_layers=2, n_heads=4),
    _encoder(
        "FNet",
        "FNet",
        inputs=lambda: {"input_ids": _ids()},
        refused="mixes tokens by a Fourier transform: it has no queries and keys",
    ),
    _encoder(
        "Reformer",
        "Reformer",
        attn_layers=["local", "lsh"],
        attention_head_size=8,
        feed_forward_size=40,
        axial_pos_embds=False,
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        num_buckets=2,
        is_decoder=False,
        refused="reversible layers run without gradients, and its hashing needs one projection for queries and keys",
    ),
    # --- text decoders
    _decoder("GPT", "OpenAIGPT", "LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    _decoder("GPT-2", "GPT2", "LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    _decoder("GPT-BigCode", "GPTBigCode", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    _decoder("GPT-Neo", "GPTNeo", attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=4, window_size=4),
    _decoder("GPT-NeoX", "GPTNeoX"),
    _decoder("GPT-NeoX-Japanese", "GPTNeoXJapanese"),
    _decoder("GPT-J", "GPTJ", n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
    _decoder("CodeGen", "CodeGen", n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4, n_ctx=64),
    _decoder("CTRL", "CTRL", "LMHeadModel", n_embd=32, n_layer=2, n_head=4, dff=40, n_positions=64),
    _decoder("OPT", "OPT", ffn_dim=40, word_embed_proj_dim=32),
    _decoder("BLOOM", "Bloom", n_layer=2, n_head=4),
    _decoder("Falcon", "Falcon", base=SMALL, num_kv_heads=4, alibi=False),
    _decoder("MPT", "Mpt", d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
    _decoder("XGLM", "XGLM", d_model=32, num_layers=2, attention_heads=4, ffn_dim=40),
    _decoder("BioGPT", "BioGpt"),
    _decoder("Llama", "Llama"),
    _decoder("Mistral", "Mistral", sliding_window=4),
    _decoder("Mixtral", "Mixtral", num_local_experts=2, num_experts_per_tok=1),
    _decoder("Qwen2", "Qwen2"),
    _decoder("Qwen2-MoE", "Qwen2Moe", num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16),
    _decoder("Qwen3", "Qwen3"),
    _decoder("Qwen3-MoE", "Qwen3Moe", num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16),
    _decoder(
        "Qwen3-Next",
        "Qwen3Next",
        num_experts=2,
        num_experts_per_tok=1,
        calls=1,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        note="linear attention is left alone",
    ),
    _decoder("Gemma", "Gemma"),
    _decoder("Gemma 2", "Gemma2", sliding_window=4, query_pre_attn_scalar=8),
    _decoder(
        "Gemma 3", "Gemma3", config=_config("Gemma3TextConfig", **GROUPED, sliding_window=4), model="Gemma3ForCausalLM"
    ),
    _decoder("Phi", "Phi"),
    _decoder("Phi-3", "Phi3"),
    _decoder("StableLM", "StableLm"),
    _decoder("Starcoder2", "Starcoder2"),
    _decoder("Cohere", "Cohere"),
    _decoder("OLMo", "Olmo"),
    _decoder("OLMo 2", "Olmo2"),
    _decoder("GLM", "Glm"),
    _decoder("Granite", "Granite"),
    _decoder("Nemotron", "Nemotron"),
    _decoder("SmolLM3", "SmolLM3"),
    _decoder(
        "DBRX",
        "Dbrx",
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1},
    ),
    _decoder("GPT-OSS", "GptOss", num_local_experts=2, num_experts_per_tok=1, sliding_window=4),
    _decoder(
        "DeepSeek-V2",
        "DeepseekV2",
        head_dim=4,
        num_key_value_heads=4,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=2,
        n_routed_experts=2,
    ),
    _decoder(
        "DeepSeek-V3",
        "DeepseekV3",
        head_dim=4,
        num_key_value_heads=4,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=2,
        n_routed_experts=8,
    ),
    _decoder(
        "DeepSeek-V3.2",
        "DeepseekV32",
        head_dim=4,
        num_key_value_heads=4,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=2,
        n_routed_experts=8,
        index_head_dim=8,
        index_n_heads=2,
        index_topk=2,
        masks=_unknown,
        note="keys that its indexer selects for no query count as padding",
    ),
    _decoder(
        "Llama 4",
        "Llama4",
        config=_config(
            "Llama4TextConfig", **GROUPED, num_local_experts=2, intermediate_size_mlp=40, attention_chunk_size=4
        ),
        model="Llama4ForCausalLM",
    ),
    _decoder("DiffLlama", "DiffLlama", calls=4, note="two calls a layer, with the same queries and keys"),
    _decoder("Doge", "Doge"),
    _decoder("JetMoE", "JetMoe", num_local_experts=2, num_experts_per_tok=2, kv_channels=8),
    _decoder("Mamba", "Mamba", state_size=4, refused="a state space model: it has no attention"),
    _decoder(
        "Jamba",
        "Jamba",
        attn_layer_period=2,
        attn_layer_offset=1,
        calls=1,
        mamba_d_state=4,
        num_experts=2,
        use_mamba_kernels=False,
        note="state space layers are left alone",
    ),
    _decoder("RWKV", "Rwkv", attention_hidden_size=32, context_length=64, refused="a recurrence: it has no attention"),
    _decoder(
        "RecurrentGemma",
        "RecurrentGemma",
        block_types=["recurrent", "attention"],
        attention_window_size=8,
        calls=1,
        note="recurrent layers are left alone",
    ),
    # --- encoder-decoders
    _translator("T5", "T5", config=_config("T5Config", **T5)),
    _translator("mT5", "MT5", config=_config("MT5Config", **T5)),
    _translator("UMT5", "UMT5", config=_config("UMT5Config", **T5)),
    _translator(
        "LongT5",
        "LongT5",
        config=_config("LongT5Config", **T5, local_radius=3),
        refused="the encoder attends in overlapping blocks",
    ),
    _translator(
        "Switch Transformers",
        "SwitchTransformers",
        config=_config("SwitchTransformersConfig", **T5, num_experts=2, num_decoder_layers=2),
    ),
    _translator("BART", "Bart"),
    _translator("mBART", "MBart"),
    _translator("Pegasus", "Pegasus"),
    _translator(
        "PEGASUS-X",
        "PegasusX",
        block_size=4,
        num_global_tokens=2,
        calls=2,
        refused="the encoder attends in blocks and to global tokens",
    ),
    _translator(
        "BigBird-Pegasus",
        "BigBirdPegasus",
        attention_type="original_full",
        note="attention_type='original_full', as with few tokens; block-sparse attention is refused",
    ),
    _translator("Marian", "Marian", "MTModel"),
    _translator("Blenderbot", "Blenderbot"),
    _translator("M2M-100", "M2M100"),
    _translator("PLBart", "PLBart"),
    _translator("MVP", "Mvp"),
    _translator(
        "LED",
        "LED",
        attention_window=4,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
        refused="the encoder attends in overlapping blocks, as Longformer",
    ),
    _translator(
        "FSMT",
        "FSMT",
        langs=["en", "de"],
        src_vocab_size=VOCABULARY,
        tgt_vocab_size=VOCABULARY,
        masks=_source_mask,
        note="does not mask padding in its decoder",
    ),
    _translator(
        "ProphetNet",
        "ProphetNet",
        config=_config(
            "ProphetNetConfig",
            vocab_size=VOCABULARY,
            hidden_size=32,
            pad_token_id=1,
            bos_token_id=2,
            eos_token_id=3,
            decoder_start_token_id=2,
            max_position_embeddings=64,
            encoder_ffn_dim=40,
            decoder_ffn_dim=40,
            num_encoder_layers=2,
            num_decoder_layers=2,
            num_encoder_attention_heads=4,
            num_decoder_attention_heads=4,
        ),
        refused="the decoder predicts several tokens in streams of their own, mixed in one attention",
    ),
    _translator("EncoderDecoderModel", "EncoderDecoder", "Model", config=_encoder_decoder, note="BERT to BERT"),
    # --- vision
    _vision("ViT", "ViT", "ForImageClassification"),
    _vision("DeiT", "DeiT"),
    _vision("BEiT", "Beit"),
    _vision("Data2VecVision", "Data2VecVision"),
    _vision("ViT-MAE", "ViTMAE"),
    _vision("ViT-MSN", "ViTMSN"),
    _vision("DINOv2", "Dinov2"),
    _vision("DINOv3", "DINOv3ViT"),
    _vision("I-JEPA", "IJepa"),
    _vision(
        "Swin",
        "Swin",
        config=_config(
            "SwinConfig", image_size=32, patch_size=4, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=2
        ),
        calls=3,
    ),
    _vision(
        "Swin v2",
        "Swinv2",
        config=_config(
            "Swinv2Config", image_size=32, patch_size=4, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=2
        ),
        calls=3,
    ),
    _vision(
        "SegFormer",
        "Segformer",
        hidden_sizes=[16, 32],
        depths=[1, 1],
        num_attention_heads=[2, 4],
        sr_ratios=[2, 1],
        num_encoder_blocks=2,
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
    ),
    _vision(
        "PVT",
        "Pvt",
        hidden_sizes=[16, 32],
        depths=[1, 1],
        num_attention_heads=[2, 4],
        sequence_reduction_ratios=[2, 1],
        num_encoder_blocks=2,
        patch_sizes=[4, 2],
        strides=[4, 2],
        mlp_ratios=[2, 2],
    ),
    _vision(
        "CvT",
        "Cvt",
        embed_dim=[16, 32],
        depth=[1, 2],
        num_heads=[2, 4],
        patch_sizes=[7, 3],
        patch_stride=[4, 2],
        patch_padding=[2, 1],
        mlp_ratio=[2.0, 2.0],
        attention_drop_rate=[0.0, 0.0],
        drop_rate=[0.0, 0.0],
        drop_path_rate=[0.0, 0.0],
        qkv_bias=[True, True],
        cls_token=[False, True],
        qkv_projection_method=["dw_bn", "dw_bn"],
        kernel_qkv=[3, 3],
        padding_kv=[1, 1],
        stride_kv=[2, 2],
        padding_q=[1, 1],
        stride_q=[1, 1],
        calls=3,
    ),
    _vision(
        "Hiera",
        "Hiera",
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 4],
        image_size=[32, 32],
        patch_size=[7, 7],
        patch_stride=[4, 4],
        patch_padding=[3, 3],
        masked_unit_size=[4, 4],
        masked_unit_attention=[True, False],
        num_query_pool=1,
        query_stride=[2, 2],
        refused="attends within units of an image that are an axis of their own",
    ),
    _vision(
        "MobileViT",
        "MobileViT",
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 32],
        calls=9,
        image_size=64,
        patch_size=2,
        inputs=lambda: {"pixel_values": _normal(SAMPLES, 3, 64, 64)},
        output_stride=8,
    ),
    _vision(
        "LeViT",
        "Levit",
        patch_size=16,
        hidden_sizes=[16, 32],
        num_attention_heads=[2, 4],
        depths=[1, 1],
        key_dim=[8, 8],
        down_ops=[["Subsample", 8, 4, 4, 2, 2]],
        mlp_ratio=[2, 2],
        attention_ratio=[2, 2],
        refused="projects under a name of its own, together with batch norms",
    ),
    _vision("YOLOS", "Yolos", num_detection_tokens=3, image_size=[32, 32]),
    _vision(
        "VideoMAE",
        "VideoMAE",
        num_frames=2,
        tubelet_size=2,
        inputs=lambda: {"pixel_values": _normal(SAMPLES, 2, 3, 32, 32)},
    ),
    _vision(
        "TimeSformer",
        "Timesformer",
        num_frames=2,
        calls=4,
        inputs=lambda: {"pixel_values": _normal(SAMPLES, 2, 3, 32, 32)},
    ),
    _vision("ViTDet", "VitDet", window_size=2, window_block_indices=[0]),
    _vision(
        "ImageGPT",
        "ImageGPT",
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        vocab_size=VOCABULARY,
        inputs=lambda: {"input_ids": _ids()},
    ),
    # --- speech
    _speech("Wav2Vec2", "Wav2Vec2"),
    _speech("HuBERT", "Hubert"),
    _speech(
        "WavLM",
        "WavLM",
        refused="hands its projections to torch's multi_head_attention_forward, which hides queries and keys",
    ),
    _speech("UniSpeech", "UniSpeech"),
    _speech("SEW", "SEW", squeeze_factor=2, masks=_squeezed_frames),
    _speech("SEW-D", "SEWD", squeeze_factor=2, position_buckets=4, masks=_squeezed_frames),
    _speech("Data2VecAudio", "Data2VecAudio"),
    _speech("Wav2Vec2-Conformer", "Wav2Vec2Conformer", conv_depthwise_kernel_size=3),
    _speech(
        "SpeechT5",
        "SpeechT5",
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        head="ForSpeechToText",
        inputs=_sound_and_text,
        cross_calls=2,
        calls=4,
    ),
    _translator(
        "Whisper",
        "Whisper",
        num_mel_bins=16,
        max_source_positions=20,
        max_target_positions=64,
        inputs=_spectrogram,
        group="speech",
        masks=_decoder_mask,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    ),
    _translator(
        "Speech2Text",
        "Speech2Text",
        group="speech",
        input_feat_per_channel=16,
        conv_channels=16,
        max_source_positions=64,
        max_target_positions=64,
        inputs=_features,
        masks=_decoder_mask,
    ),
    _vision(
        "AST",
        "AST",
        num_mel_bins=16,
        max_length=32,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
        group="speech",
        inputs=lambda: {"input_values": _normal(SAMPLES, 32, 16)},
    ),
    # --- text with images, layouts and tables
    Family("CLIP", "multi-modal", "CLIPModel", _two_towers("CLIP"), text_and_image, calls=4),
    Family("Chinese-CLIP", "multi-modal", "ChineseCLIPModel", _two_towers("ChineseCLIP"), text_and_image, calls=4),
    Family(
        "SigLIP",
        "multi-modal",
        "SiglipModel",
        _two_towers("Siglip"),
        text_and_image,
        calls=4,
        cross_calls=1,
        note="the pooling of its vision part attends to the image: cross-attention",
    ),
    Family("BLIP", "multi-modal", "BlipModel", _two_towers("Blip"), text_and_image, calls=4),
    Family("OWL-ViT", "multi-modal", "OwlViTModel", _two_towers("OwlViT"), text_and_image, calls=4),
    _encoder("LayoutLM", "LayoutLM", group="multi-modal", inputs=text_with(bbox=_boxes)),
    _encoder(
        "LiLT",
        "Lilt",
        hidden_size=48,
        group="multi-modal",
        inputs=text_with(bbox=_boxes),
        channel_shrink_ratio=2,
        other_softmaxes=2,
        note="text; its layout attention shares the module and is not captured",
    ),
    _encoder("MarkupLM", "MarkupLM", group="multi-modal", max_depth=5, xpath_unit_hidden_size=4),
    _encoder(
        "BROS",
        "Bros",
        group="multi-modal",
        hidden_size=64,
        dim_bbox_sinusoid_emb_2d=16,
        dim_bbox_projection=16,
        inputs=text_with(bbox=lambda: _boxes().float() / 1000),
    ),
    _encoder(
        "ViLT", "Vilt", group="multi-modal", inputs=text_and_image, image_size=32, patch_size=16, masks=_text_then(5)
    ),
    _encoder(
        "GIT",
        "Git",
        group="multi-modal",
        inputs=text_and_image,
        vision_config=PATCHES,
        calls=4,
        masks=_text_then(17, first=True),
    ),
    _encoder(
        "VisualBERT",
        "VisualBert",
        group="multi-modal",
        visual_embedding_dim=16,
        inputs=text_with(visual_embeds=lambda: _normal(SAMPLES, 3, 16)),
        masks=_text_then(3),
    ),
    _encoder(
        "LXMERT",
        "Lxmert",
        group="multi-modal",
        l_layers=1,
        x_layers=1,
        r_layers=1,
        visual_feat_dim=16,
        inputs=text_with(visual_feats=lambda: _normal(SAMPLES, 3, 16), visual_pos=lambda: _normal(SAMPLES, 3, 4)),
        calls=4,
        cross_calls=2,
    ),
)

BY_NAME = {family.name: family for family in FAMILIES}
