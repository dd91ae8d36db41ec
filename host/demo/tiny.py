"""A tiny checkpoint with random weights, in the layout of ``Qwen/Qwen-Image-2.1``.

Its pictures mean nothing. It exists so that every number on the way can be compared with the
reference implementation's: diffusers loads it as it loads the real one. Needs diffusers and
transformers.
"""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn

from ..latents import QWEN_IMAGE_21
from ..prompt import apply_template

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip

# How Qwen2's tokenizer splits text before the byte-level merges: contractions, words with at most
# one leading symbol, single digits, runs of symbols, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
)

TRAINING_TEXT = (
    "a red apple on a wooden table, studio lighting",
    "This is an RGBA image with transparency. A cute cartoon dragon sticker. "
    "The image has alpha channel and the background is transparent.",
    "an icon of a blue potion bottle for a role-playing game, flat colours, thick outline",
    "The quick brown fox jumps over the lazy dog, 0123456789 times.",
)


def build_tokenizer(texts: tuple[str, ...] = TRAINING_TEXT, vocabulary: int = 600) -> Tokenizer:
    """A byte-level BPE built as Qwen2's is, with a vocabulary of hundreds instead of 151,643."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([apply_template(text) for text in texts], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tiny_checkpoint(folder: str | Path, seed: int = 0) -> Path:
    """Write the checkpoint (about 8 MB, bf16) to ``folder``; the same seed gives the same weights."""
    from diffusers import AutoencoderKLQwenImage21, FlowMatchEulerDiscreteScheduler, QwenImage21Transformer2DModel
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    folder = Path(folder)
    tokenizer = build_tokenizer()
    text_encoder = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**_text_encoder_config(tokenizer)))
    transformer = QwenImage21Transformer2DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=128, context_in_dim=64, mlp_ratio=2
    )
    vae = AutoencoderKLQwenImage21(
        base_dim=4, decoder_base_dim=8, dim_mult=[1, 1, 2, 4, 4], num_res_blocks=1,
        latents_mean=list(QWEN_IMAGE_21.mean), latents_std=list(QWEN_IMAGE_21.std),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for name, model in (("text_encoder", text_encoder), ("transformer", transformer), ("vae", vae)):
        _randomize(model, generator)
        model.to(torch.bfloat16).save_pretrained(folder / name)
    FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256, max_image_seq_len=8192, base_shift=0.5, max_shift=0.9, shift_terminal=0.02,
        use_dynamic_shifting=True,
    ).save_pretrained(folder / "scheduler")  # fmt: skip
    _write_processor(folder / "processor", tokenizer)
    (folder / "model_index.json").write_text(json.dumps(_model_index(), indent=2), encoding="utf-8")
    return folder


def _randomize(model: nn.Module, generator: torch.Generator) -> None:
    """Weights that keep the scale of what passes through them, scales near 1, biases near 0.

    Default initialisations leave gates and modulations near zero, where a wrong input would not show.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
            if fan_in > 1:
                parameter.copy_(noise * fan_in**-0.5)
            else:
                parameter.add_(0.1 * noise)


def _text_encoder_config(tokenizer: Tokenizer) -> dict:
    ids = {
        name: tokenizer.token_to_id(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start", "vision_end")
    }
    return {
        "text_config": {
            "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True, "mrope_section": [6, 5, 5],
            },
        },
        "vision_config": {
            "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [],
        },
        "image_token_id": ids["image_pad"], "video_token_id": ids["video_pad"],
        "vision_start_token_id": ids["vision_start"], "vision_end_token_id": ids["vision_end"],
        "tie_word_embeddings": False,
    }  # fmt: skip


def _write_processor(folder: Path, tokenizer: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
    )  # fmt: skip
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16, merge_size=2),
        tokenizer=fast,
        video_processor=Qwen3VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)


def _model_index() -> dict:
    return {
        "_class_name": "QwenImage21Pipeline",
        "processor": ["transformers", "Qwen3VLProcessor"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
        "transformer": ["diffusers", "QwenImage21Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage21"],
    }
