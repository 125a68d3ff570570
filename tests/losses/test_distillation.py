import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import properties
import properties_distillation
import pytest

from infcl_jax import clip_loss, distillation_loss, matryoshka
from infcl_jax.losses import ClipLoss, DistilledLoss, MatryoshkaLoss, SiglipLoss, clip_and_distillation, siglip_loss
from infcl_jax.losses.base import Targets
from infcl_jax.losses.distillation import IMPLEMENTATIONS as ALL
from infcl_jax.models import CLIPOutput
from infcl_jax.ops.pairwise.lse import available_implementations

IMPLEMENTATIONS = [name for name in ALL if name in available_implementations()]
GOLDEN = Path(__file__).parents[1] / "golden" / "distillation.npz"
CHECKS = properties_distillation.checks()


@pytest.mark.parametrize(
    ("name", "examples"),
    [
        *((name, 8) for name in CHECKS if name != "xla-8"),
        *(pytest.param(name, 200, marks=pytest.mark.full) for name in CHECKS),
    ],
)
def test_matches_float64(name, examples):
    properties.run(CHECKS[name], examples)


@pytest.mark.parametrize("implementation", ("dense", "xla"))
def test_probabilities_of_equal_pairs_add_up_to_one(implementation):
    """The gap multiplies what the sum of probabilities lacks by the difference of the logits, here 28."""
    rows = properties.ROWS[1]
    pairs = properties.Geometry(0, None, 0.0, (1, 1), ((), ())).features(rows)
    mask, weights = np.ones(rows, bool), np.ones(rows, np.float32)
    scales = jnp.float32(1.0), jnp.float32(29.0)
    losses = properties_distillation.losses(implementation, 1)
    (got, _), _ = losses(*pairs, scales[0], *pairs, scales[1], mask=mask, weights=weights)
    _, want, *_ = oracle.distillation(pairs, pairs, *map(float, scales), mask, weights)
    properties.assert_within(got, want, 1 + want, float(scales[1]))


@functools.cache
def features(rows=12, dim=8, teacher_dim=10, dtype=np.float32, kind="aligned"):
    teacher = oracle.features("random", rows, rows, teacher_dim, np.float32, seed=1)
    return *oracle.features(kind, rows, rows, dim, dtype), *teacher


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_open_clip_up_to_the_entropy_of_the_teacher(implementation):
    golden = np.load(GOLDEN)
    student, teacher = ((golden[f"{side}image"], golden[f"{side}text"]) for side in ("", "teacher_"))

    def loss(*args):
        return clip_and_distillation(*args, implementation=implementation)[::-1]

    with jax.enable_x64(True):
        args = (*map(jnp.asarray, (*student, golden["scale"], *teacher)), golden["teacher_scale"])
        (value, clip), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*args)
    assert value.dtype == np.float64
    assert float(value) == pytest.approx(golden["distillation"] - golden["entropy"], rel=1e-12)
    assert float(clip) == pytest.approx(golden["contrastive"], rel=1e-12)
    for name, got in zip(("image", "text", "scale"), gradients, strict=True):
        assert oracle.relative_error(got, golden[f"d_{name}"]) <= 1e-12


@pytest.mark.parametrize(
    ("dtype", "teacher_dtype", "tolerance"),
    [
        (jnp.bfloat16, jnp.bfloat16, 1e-2),
        pytest.param(jnp.bfloat16, jnp.float32, 1e-2, marks=pytest.mark.full),
        (jnp.float16, jnp.float32, 1e-3),
    ],
)
def test_a_student_close_to_its_teacher_in_low_precision(dtype, teacher_dtype, tolerance):
    """At scale 100, with dS rounded before the teacher's term is subtracted, the gradient would be noise."""
    rng = np.random.default_rng(0)
    x = oracle.unit(np.repeat(oracle.unit(rng.normal(size=(48, 24))), 2, 0) + 0.02 * rng.normal(size=(96, 24)) / 5)
    y = oracle.unit(x + 0.05 * rng.normal(size=(96, 24)) / 5)
    student = [jnp.asarray(a, dtype) for a in (x, y)]
    teacher = [jnp.asarray(oracle.unit(a + 0.01 * rng.normal(size=a.shape)), teacher_dtype) for a in (x, y)]
    _, want, gradients, sizes = oracle.distillation(student, teacher, 100.0, 90.0)
    loss = functools.partial(distillation_loss, mesh=oracle.mesh_of(4))
    got, d_student = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*student, 100.0, *teacher, 90.0)
    assert float(got) == pytest.approx(want, abs=2e-5)
    for g, w in zip(d_student[:2], gradients[:2], strict=True):
        assert oracle.relative_error(g, w) <= tolerance
    assert abs(float(d_student[2]) - gradients[2]) <= 1e-5 * sizes[2]


def test_a_student_that_equals_its_teacher_has_no_gradient():
    image, text, *_ = features(kind="adversarial")
    loss = lambda *student: distillation_loss(*student, image, text, 100.0)  # noqa: E731
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(image, text, 100.0)
    *_, sizes = oracle.distillation((image, text), (image, text), 100.0, 100.0)
    assert abs(float(value)) < 2e-5
    for g, size in zip(gradients, sizes, strict=True):
        assert np.linalg.norm(g) <= 1e-5 * np.linalg.norm(size)


def test_the_teacher_has_no_gradient():
    for implementation in IMPLEMENTATIONS:
        loss = functools.partial(distillation_loss, implementation=implementation)
        gradients = jax.jit(jax.grad(loss, argnums=(3, 4, 5)))(*features()[:2], 9.0, *features()[2:], 9.0)
        assert not any(np.any(g) for g in gradients)


def test_clip_has_the_value_of_clip_loss():
    image, text, *teacher = features()
    weights = np.arange(12, dtype=np.float32)
    clip, _ = jax.jit(clip_and_distillation)(image, text, 14.3, *teacher, 9.0, weights=weights)
    assert clip == pytest.approx(float(clip_loss(image, text, 14.3, weights=weights)), rel=1e-6)


def test_no_array_has_the_size_of_all_pairs_of_a_device():
    b, devices = 4096, 4
    x, teacher, mesh = jnp.zeros((b, 16), jnp.bfloat16), jnp.zeros((b, 8), jnp.bfloat16), oracle.mesh_of(devices)

    def loss(x, y, s):
        return sum(clip_and_distillation(x, y, s, teacher, teacher, 9.0, mesh=mesh))

    text = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(x, x, jnp.float32(9)).as_text()
    sizes = [math.prod(map(int, dims.split("x"))) for dims in re.findall(r"tensor<(\d+(?:x\d+)*)x[a-z]", text)]
    assert max(sizes) == 512 * b // devices  # one strip of rows and the columns of a block


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": np.ones((8, 4), np.float32)}, "same shape"),
        ({"teacher_image": np.ones((7, 3), np.float32)}, r"same shape \[8, Dt\], got \(7, 3\) and \(8, 5\)"),
        ({"teacher_text": np.ones((8, 5), np.float16)}, "one floating dtype"),
        ({"implementation": "disco"}, "implementation"),
        ({"teacher_scale": np.ones(8, np.float32)}, "teacher_scale"),
        ({"axis_name": "rows"}, "enclosing shard_map, got 'rows'"),
        ({"mask": np.ones(7, bool)}, "mask"),
        ({"weights": np.ones(7, np.float32)}, "weights"),
    ],
)
def test_bad_input_is_a_one_line_error(change, message):
    args = dict.fromkeys(("image", "text"), np.ones((8, 3), np.float32))
    args |= dict.fromkeys(("teacher_image", "teacher_text"), np.ones((8, 5), np.float32))
    with pytest.raises(ValueError, match=message):
        distillation_loss(**args | {"scale": 1.0, "teacher_scale": 1.0} | change)


def test_training_losses_add_the_divergence():
    image, text, *teacher = features()
    output = CLIPOutput(image, text, jnp.float32(14.3), jnp.float32(-10.0))
    inputs = dict(zip(("teacher_image", "teacher_text"), teacher, strict=True))
    ids = np.stack([np.arange(12) // 2, np.arange(12) // 2], 1).astype(np.int32)
    divergence = functools.partial(distillation_loss, teacher_image=teacher[0], teacher_text=teacher[1])
    whole = float(jax.jit(divergence)(image, text, 14.3, teacher_scale=20.0))
    by_id = ClipLoss(name="clip", targets=Targets(positives="caption"))
    cases = (
        (ClipLoss(name="clip"), {}, jax.jit(clip_loss)(image, text, 14.3)),
        (by_id, {"ids": ids}, jax.jit(clip_loss)(image, text, 14.3, image_ids=ids, text_ids=ids)),
        (SiglipLoss(name="siglip"), {}, jax.jit(siglip_loss)(image, text, 14.3, -10.0)),
    )
    for loss, more, expected in cases:
        distilled = DistilledLoss.wrap(loss, 0.5, 20.0)
        assert set(distilled.batch_inputs) == {*inputs, *more}
        result = jax.jit(lambda distilled=distilled, more=more: distilled(output, **inputs, **more))()
        assert float(result.value) == pytest.approx(float(expected) + 0.5 * whole, rel=1e-5)
        assert float(result.distillation) == pytest.approx(whole, rel=1e-5)
    prefixes = MatryoshkaLoss.wrap(DistilledLoss.wrap(cases[0][0], 0.5, 20.0), (4, 8))
    expected = matryoshka(lambda *args: clip_loss(*args) + 0.5 * divergence(*args, teacher_scale=20.0), (4, 8))
    got = jax.jit(lambda: prefixes(output, **inputs))().value
    assert float(got) == pytest.approx(float(jax.jit(expected)(image, text, 14.3)), rel=1e-5)
    with pytest.raises(ValueError, match="implementation with a teacher"):
        DistilledLoss.wrap(SiglipLoss(name="siglip", implementation="dense"), 0.5, 20.0)
