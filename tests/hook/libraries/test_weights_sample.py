"""A sample of the weights of a model, by which an evaluation with other weights is seen."""

from __future__ import annotations

from typing import Any

from tests.lazy import LazyModule

torch, weights_sample = LazyModule("torch"), LazyModule("trainer_hook.libraries.weights_sample")


def packed() -> Any:
    """Return quantized values, which cannot be taken one by one."""

    class Packed(torch.Tensor):  # type: ignore[misc]
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.__getitem__:
                raise NotImplementedError("aten.select is not implemented for Packed")
            return super().__torch_function__(function, types, args, kwargs or {})

    return torch.zeros(2, 2).as_subclass(Packed)


def test_other_weights_are_seen() -> None:
    model = torch.nn.Linear(2, 2)
    sample = weights_sample.WeightsSample(model)
    assert sample.is_same(bool)
    sample = weights_sample.WeightsSample(model)
    with torch.no_grad():
        model.weight.add_(1.0)
    assert not sample.is_same(bool)


def test_a_model_whose_weights_cannot_be_taken_one_by_one_is_evaluated_all_the_same() -> None:
    model = torch.nn.Linear(2, 2)
    model.packed = torch.nn.Parameter(packed(), requires_grad=False)
    assert weights_sample.WeightsSample(model).is_same(bool)
