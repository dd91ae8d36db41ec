"""Batched training computes what the run-time graph computes, one picture at a time."""

import torch

from coreai_rgba_image.host.demo.networks import DemoModel, Rope, orthogonalized


def test_batched_velocity_is_the_graphs() -> None:
    model = DemoModel(vocabulary=300, seed=0)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.dit.proj_out.weight, std=0.1)
    x, t = torch.randn(3, 24, 64), torch.tensor([0.1, 0.5, 1.0])
    ids = torch.randint(0, 300, (3, 25))
    rope = Rope.of(20, 6, 4)
    tables = (rope.text_cos, rope.text_sin, rope.image_cos, rope.image_sin)
    with torch.no_grad():
        text = model.text_features(ids, drop_idx=5)
        together = model.velocity(x, text, t, rope)
        alone = [model.dit(x[i : i + 1], text[i : i + 1], t[i : i + 1], *tables) for i in range(3)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)
    assert together.std() > 0.1


def test_an_orthogonalised_matrix_has_singular_values_near_one() -> None:
    for shape in ((32, 96), (96, 32)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
        assert values.min() > 0.5
        assert values.max() < 1.3
