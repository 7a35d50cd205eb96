"""Models of Hugging Face, with tiny configurations drawn at random."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
import torch

from sapwood.state.graph import GraphCache, Source, decode_graph, find_graph, match_graphs

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)


def made(name: str, seed: int, classes: int = 3) -> tuple[Any, Any]:
    import transformers as hf

    rng = random.Random(seed)
    heads, layers = rng.choice([2, 4]), rng.randint(1, 3)
    width, vocabulary = heads * rng.choice([8, 16]), rng.randint(20, 40)
    tokens = {"input_ids": torch.zeros(2, 6, dtype=torch.long)}
    image = {"pixel_values": torch.zeros(2, 3, 16, 16)}
    common = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    text = {"vocab_size": vocabulary, "max_position_embeddings": 16, "intermediate_size": 48}
    labels = {"num_labels": classes}
    if name == "gpt2":
        config = hf.GPT2Config(
            n_embd=width, n_layer=layers, n_head=heads, vocab_size=vocabulary, n_positions=16
        )
        return hf.GPT2LMHeadModel(config), tokens
    if name == "llama":
        keys = rng.choice([1, 2])
        return hf.LlamaForCausalLM(
            hf.LlamaConfig(**common, **text, num_key_value_heads=keys)
        ), tokens
    if name == "bert":
        return hf.BertForSequenceClassification(hf.BertConfig(**common, **text, **labels)), tokens
    if name == "t5":
        config = hf.T5Config(
            d_model=width,
            d_kv=8,
            d_ff=48,
            num_layers=layers,
            num_heads=heads,
            vocab_size=vocabulary,
        )
        tokens["decoder_input_ids"] = tokens["input_ids"]
        return hf.T5ForConditionalGeneration(config), tokens
    if name == "vit":
        config = hf.ViTConfig(**common, intermediate_size=48, image_size=16, patch_size=8, **labels)
        return hf.ViTForImageClassification(config), image
    depths = [rng.randint(1, 2), rng.randint(1, 2)]
    sizes = [8, 16]
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=sizes, depths=depths, **labels)
    return hf.ResNetForImageClassification(config), image


NAMES = ["gpt2", "llama", "bert", "t5", "vit", "resnet"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_ids_and_transfers(name: str, seed: int) -> None:
    model, sample = made(name, seed)
    found = find_graph(model, sample)
    assert found.source is Source.TRACED
    assert not found.reads_values
    assert set(found.tensors) == set(model.state_dict())
    larger = {key: torch.cat([value, value]) for key, value in sample.items()}
    assert find_graph(made(name, seed)[0].train(), larger).ids == found.ids
    with torch.device("meta"):
        assert find_graph(made(name, seed)[0], sample).ids == found.ids
    parts = found.encoded
    assert decode_graph(parts.topology, parts.configs, parts.labels) == found
    assert len(parts.topology) <= 8 * len(found.ids)
    other = find_graph(made(name, seed + 1)[0], sample)
    match = match_graphs(found, other)
    assert all(p.old.shape == p.new.shape for p in match.tensors)
    assert not match.refused


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "vit", "resnet"])
def test_another_head_keeps_the_body(name: str) -> None:
    old, new = (made(name, 0, classes) for classes in (3, 5))
    match = match_graphs(find_graph(*old), find_graph(*new))
    assert all(p.old.names == p.new.names for p in match.tensors)
    missing = set(new[0].state_dict()) - {n for p in match.tensors for n in p.new.names}
    assert missing
    assert all("classifier" in name for name in missing)


@pytest.mark.filterwarnings("ignore")
def test_the_cache_knows_a_model_with_a_configuration_object() -> None:
    cache = GraphCache()
    model, sample = made("llama", 0)
    assert cache.find(model, sample) is cache.find(model, sample)
    model.config.rms_norm_eps = 0.5  # nobody knows what looks at it
    cache.find(model, sample)
    assert (cache.hits, cache.misses) == (1, 2)
