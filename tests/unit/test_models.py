"""Each model has the parameters of the literature, and each of them is learned."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from edgegossip.models import (
    MODELS,
    alexnet,
    eight_layers,
    lenet5,
    lrn_cnn,
    mlp,
    mobilenet_v2,
    resnet20,
    sensor_cnn,
    squeezenet,
    vgg11,
    vgg16,
)
from edgegossip.models.dropout import replace_dropout
from edgegossip.models.normalization import EvoNormS0, Normalization

CIFAR = (3, 32, 32)
Build = Callable[..., nn.Module]


def num_params(
    build: Build, input_shape: tuple[int, ...], num_classes: int, **how: object
) -> int:
    with torch.device("meta"):
        model = build(input_shape, num_classes, **how)
    return sum(parameter.numel() for parameter in model.parameters())


def seeded(
    build: Build, input_shape: tuple[int, ...], num_classes: int, **how: object
) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build(input_shape, num_classes, **how)
    replace_dropout(model, torch.Generator().manual_seed(0))
    return model


def pictures(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


# Torchvision's counts are those in its documentation (`num_params` of the ImageNet weights).
ALEXNET_FIRST_LAYERS = (64 * 3 * 11 * 11 + 64) - (64 * 3 * 3 * 3 + 64)


@pytest.mark.parametrize(
    ("build", "input_shape", "num_classes", "expected"),
    [
        pytest.param(mlp, (1, 28, 28), 10, 784 * 64 + 64 + 640 + 10, id="by hand"),
        # LeCun et al. 1998: C1, C5, F6; C3 on all channels (there 1,516), the output linear.
        pytest.param(lenet5, (1, 28, 28), 10, 156 + 2416 + 48120 + 10164 + 850, id="LeNet-5"),
        pytest.param(lenet5, CIFAR, 10, 62_006, id="PyTorch's CIFAR-10 tutorial"),
        pytest.param(lrn_cnn, CIFAR, 10, 148_298, id="printed by ADSP's published code"),
        pytest.param(alexnet, CIFAR, 1000, 61_100_840 - ALEXNET_FIRST_LAYERS, id="torchvision"),
        pytest.param(squeezenet, CIFAR, 1000, 1_235_496, id="torchvision squeezenet1_1"),
        pytest.param(mobilenet_v2, CIFAR, 1000, 3_504_872, id="torchvision mobilenet_v2"),
        # akamaster/pytorch_resnet_cifar10, 0.27 M in He et al. 2016, Table 6.
        pytest.param(resnet20, CIFAR, 10, 269_722, id="ResNet-20 with option A"),
        # Sparse-Push's 9.488 M: column A without its head, 9,220,480 in torchvision, + 512, 10.
        pytest.param(vgg11, CIFAR, 10, 9_220_480 + 512 * 513 + 10 * 513, id="Sparse-Push"),
        # Column D without its head, 14,714,688 in torchvision and Keras.
        pytest.param(vgg16, CIFAR, 10, 14_714_688 + 512 * 513 + 10 * 513, id="VGG16"),
    ],
)
def test_parameter_count_is_that_of_the_literature(
    build: Build, input_shape: tuple[int, ...], num_classes: int, expected: int
) -> None:
    assert num_params(build, input_shape, num_classes) == expected


@pytest.mark.parametrize(
    "build", [alexnet, eight_layers, squeezenet, mobilenet_v2, resnet20, vgg11, vgg16]
)
def test_parameter_count_in_the_docstring_is_true(build: Build) -> None:
    assert f"{num_params(build, CIFAR, 10):,} parameters for 10 classes" in (
        build.__doc__ or ""
    )


@pytest.mark.parametrize(
    ("width", "millions"), [(0.35, 1.68), (0.5, 1.97), (0.75, 2.64), (1.4, 6.11)]
)
def test_parameters_of_other_widths_of_mobilenet_v2(width: float, millions: float) -> None:
    """As timm lists them, for 1000 classes."""
    count = num_params(mobilenet_v2, CIFAR, 1000, width=width)
    assert round(count / 1e6, 2) == millions


@pytest.mark.parametrize("build", [alexnet, vgg11, vgg16])
def test_half_of_the_channels_are_about_a_quarter_of_the_parameters(build: Build) -> None:
    full, half = (num_params(build, CIFAR, 10, width=width) for width in (1.0, 0.5))
    assert half == pytest.approx(full / 4, rel=0.01)


def test_scores_of_squeezenet_are_of_either_sign() -> None:
    """Behind a ReLU all of them ended at zero on CIFAR-10, where there is no gradient."""
    scores = seeded(squeezenet, CIFAR, 10).eval()(pictures(4, *CIFAR))
    assert (scores < 0).any()
    assert (scores > 0).any()


@pytest.mark.parametrize("width", [0.0, -1.0, 5.0, float("nan")])
@pytest.mark.parametrize("build", [alexnet, eight_layers, mobilenet_v2, vgg11, vgg16])
def test_a_width_out_of_range_is_refused(build: Build, width: float) -> None:
    with pytest.raises(ValueError, match=r"takes a width above 0 and up to 4, got"):
        build(CIFAR, 10, width=width)


@pytest.mark.parametrize("build", [alexnet, squeezenet, mobilenet_v2])
def test_size_of_the_pictures_changes_no_parameters(build: Build) -> None:
    assert num_params(build, CIFAR, 10) == num_params(build, (3, 64, 64), 10)


def assert_learns(model: nn.Module, x: Tensor) -> None:
    nn.functional.cross_entropy(model(x), torch.arange(len(x))).backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize(
    ("name", "input_shape"),
    [
        ("mlp", (1, 8, 8)),
        ("lenet5", (1, 28, 28)),
        ("lenet5", CIFAR),
        ("lrn-cnn", CIFAR),
        ("eight-layers", (1, 28, 28)),
        ("squeezenet", (3, 8, 8)),
        ("squeezenet", CIFAR),
        ("mobilenet-v2", (3, 8, 8)),
        ("resnet20", (1, 8, 8)),
        ("resnet20", CIFAR),
        ("sensor-cnn", (9, 128)),
        *(
            pytest.param(name, (3, side, side), marks=pytest.mark.slow)
            for name, side in (
                ("vgg11", 32),
                ("vgg16", 32),
                ("alexnet", 8),
                ("alexnet", 32),
                ("alexnet", 64),
                ("squeezenet", 64),
                ("mobilenet-v2", 32),
                ("mobilenet-v2", 64),
            )
        ),
    ],
)
def test_every_parameter_gets_a_finite_gradient(
    name: str, input_shape: tuple[int, ...]
) -> None:
    assert_learns(seeded(MODELS[name], input_shape, 4), pictures(4, *input_shape))


@pytest.mark.parametrize("build", [eight_layers, resnet20, mobilenet_v2])
@pytest.mark.parametrize("normalization", ["none", "group", "evonorm"])
def test_every_normalization_gives_finite_gradients(
    build: Build, normalization: Normalization
) -> None:
    model = seeded(partial(build, normalization=normalization), (3, 16, 16), 2)
    assert_learns(model, pictures(2, 3, 16, 16))


@pytest.mark.parametrize("normalization", ["batch", "group", "evonorm"])
def test_evonorm_takes_the_place_of_the_activation(normalization: Normalization) -> None:
    with torch.device("meta"):
        model = vgg11(CIFAR, 10, normalization=normalization)
    kinds = [type(layer) for layer in model.modules()]
    is_evonorm = normalization == "evonorm"
    assert kinds.count(EvoNormS0) == (8 if is_evonorm else 0)
    assert kinds.count(nn.ReLU) == (
        1 if is_evonorm else 9
    )  # one lies between the linear layers


@pytest.mark.parametrize(
    ("build", "side"),
    [
        *itertools.product(
            [alexnet, eight_layers, squeezenet, mobilenet_v2, resnet20], [8, 64]
        ),
        *itertools.product([vgg11, vgg16], [32]),
    ],
)
def test_pictures_become_one_output_a_class(build: Build, side: int) -> None:
    with torch.device("meta"):
        assert build((3, side, side), 10).eval()(torch.empty(2, 3, side, side)).shape == (2, 10)


@pytest.mark.parametrize("side", [8, 64])
@pytest.mark.parametrize("build", [vgg11, vgg16])
def test_vgg_takes_pictures_of_one_size_only(build: Build, side: int) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match="with a height of 32"):
        build((3, side, side), 10)


def test_eight_layers_are_eight_blocks_of_one_layer_with_weights_each() -> None:
    with torch.device("meta"):
        model = eight_layers(CIFAR, 10, width=0.5)
    layers = [
        [type(layer) for layer in block.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
        for block in model
    ]
    assert layers == [[nn.Conv2d]] * 4 + [[nn.Linear]] * 4
    assert num_params(eight_layers, CIFAR, 10, width=0.5) < num_params(eight_layers, CIFAR, 10)


def test_resnet20_shortcut_takes_every_second_pixel_and_adds_channels_of_zeros() -> None:
    # Option A, seen by silencing the residual branch of the first block that halves the side.
    model = resnet20(CIFAR, 10, normalization="none")
    block = next(layer for layer in model.children() if getattr(layer, "stride", 1) == 2)
    nn.init.zeros_(block.get_parameter("residual.2.weight"))
    x = pictures(2, 16, 8, 8).abs()
    y = block(x)
    assert y.shape == (2, 32, 4, 4)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()


@pytest.mark.parametrize(
    ("build", "input_shape", "message"),
    [
        (lenet5, (1, 8, 8), r"lenet5 .* height of 28 or 32, got input_shape=\(1, 8, 8\)"),
        (alexnet, (3, 4, 4), r"alexnet .* height of 8 to 64, got"),
        (resnet20, (3, 32, 16), r"square"),
        (squeezenet, (9, 128), r"mlp"),
        (vgg16, (3, 64, 64), r"height of 32, got"),
        (sensor_cnn, (3, 32, 32), r"windows \(channels, length\)"),
        (sensor_cnn, (9, 3), r"length of at least 4"),
    ],
)
def test_sample_of_the_wrong_shape_is_refused_with_what_is_allowed(
    build: Build, input_shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(input_shape, 10)


def test_hidden_layer_without_units_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 1, got \(64, 0\)"):
        mlp((4,), 2, hidden=(64, 0))


def test_unknown_normalization_is_refused_with_the_one_meant() -> None:
    with pytest.raises(ValueError, match="did you mean 'batch'"):
        resnet20(CIFAR, 10, normalization="bacth")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"alexnet", "vgg11", "vgg16"}))
def test_model_is_the_same_for_the_same_seed(name: str) -> None:
    input_shape = (9, 128) if name == "sensor-cnn" else CIFAR
    first, again = (seeded(MODELS[name], input_shape, 10).state_dict() for _ in range(2))
    assert all(torch.equal(first[key], again[key]) for key in first)
