"""Protocol of the training losses.

A training loss is a subclass of `Loss` and a row of `infcl_jax.training.LOSSES`.
"""

import abc
import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from jax.sharding import Mesh
from jaxtyping import Float, Integer

from infcl_jax.losses.batch import Array, AxisName
from infcl_jax.losses.samples import SampleState, write_samples
from infcl_jax.ops.common.checks import check_implementation
from infcl_jax.ops.pairwise.lse import IMPLEMENTATIONS
from infcl_jax.ops.pairwise.lse.guide import Margin

if TYPE_CHECKING:
    from infcl_jax.models import CLIPOutput

# Inputs of a loss with sample state, in addition to the model output.
SAMPLE_INPUTS = ("index", "samples", "step")

# Features `[b, Dt]` of the encoders of a frozen teacher, inputs of a loss with distillation or with guided negatives.
IMAGE_TEXT_TEACHER = ("teacher_image", "teacher_text")
RETRIEVAL_TEACHER = ("teacher_query", "teacher_passage")
TEACHER_INPUTS = IMAGE_TEXT_TEACHER + RETRIEVAL_TEACHER


@dataclasses.dataclass(frozen=True)
class Targets:
    """Targets and negatives of a loss over one batch.

    Attributes:
      positives: "pair": the positive of an image is its own text. Else the batch has ids, and all pairs with equal ids
        are positives, see `infcl_jax.clip_loss`.
      multi_positive: "mean" or "any", see `infcl_jax.clip_loss`.
      label_smoothing: share of each target that is spread over all pairs, see `infcl_jax.clip_loss`.
      guide: negatives by the features of a teacher; None: all other pairs are negatives.
    """

    positives: str = "pair"
    multi_positive: str = "mean"
    label_smoothing: float = 0.0
    guide: Margin | None = None

    @property
    def by_id(self) -> bool:
        """True if positives are given by id."""
        return self.positives != "pair"


ONE_POSITIVE = Targets()


class LossOutput(NamedTuple):
    """Loss of one batch.

    Examples:
      >>> LossOutput(jnp.float32(2.0)).rows is None  # no sample state
      True

    Attributes:
      value: scalar loss.
      rows: the batch's new rows of the sample state; None for losses without sample state.
      logit_scale: scalar inverse temperature for the metrics; None: the logit scale of the model.
      extra_positives: scalar for the metrics, number of positives of the batch in addition to its pairs; None without
        ids.
      distillation: scalar for the metrics, divergence from the teacher; None without one.
    """

    value: Float[Array, ""]
    rows: SampleState | None = None
    logit_scale: Float[Array, ""] | None = None
    extra_positives: Float[Array, ""] | None = None
    distillation: Float[Array, ""] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss(abc.ABC):
    """Training loss of a global batch.

    Examples:
      >>> class HalfLoss(Loss):
      ...     def __call__(self, output, **inputs):
      ...         return LossOutput(clip_loss(output.image, output.text, output.logit_scale / 2, mesh=self.mesh))
      >>> loss = HalfLoss.create("half", mesh=None, implementation=None)
      >>> output = CLIPOutput(image, text, jnp.float32(14.3), logit_bias=None)
      >>> print(f"{loss(output).value:.2f}")
      0.37

    Attributes:
      name: key of the loss in `infcl_jax.training.LOSSES`.
      mesh: devices; the batch and the sample state are sharded over all its axes. None: one device.
      implementation: backend of `infcl_jax.pairwise_lse`; None: the best for the platform.
      targets: targets of the rows; losses with sample state ignore them.
      max_logit_scale: limit of the model's logit scale, to which `infcl_jax.training` clamps it after every update:
        CLIP's 100 (Radford et al. 2021, section 2.5), or `math.inf` with a sigmoid.
      inputs: keyword arguments of `__call__`: `SAMPLE_INPUTS` for losses with sample state, none by default. With
        positives by id, `__call__` also takes "ids", see `batch_inputs`.
      guide_inputs: features of a guide that the loss reads; none if it supports no guide.
      implementations: implementations that the loss supports.

    Raises:
      ValueError: the implementation is unknown.
    """

    name: str
    mesh: Mesh | None = None
    implementation: str | None = None
    targets: Targets = ONE_POSITIVE
    max_logit_scale: float = 100.0

    inputs: ClassVar[tuple[str, ...]] = ()
    guide_inputs: ClassVar[tuple[str, ...]] = ()
    implementations: ClassVar[Collection[str]] = IMPLEMENTATIONS

    def __post_init__(self) -> None:
        check_implementation(self.implementation, IMPLEMENTATIONS)

    @classmethod
    def create(
        cls, name: str, mesh: Mesh | None, implementation: str | None, targets: Targets = ONE_POSITIVE, **settings: Any
    ) -> Self:
        """Create the loss from the settings of a run, the keyword arguments of `infcl_jax.training.make_loss`."""
        del settings
        return cls(name=name, mesh=mesh, implementation=implementation, targets=targets)

    @property
    def batch_inputs(self) -> tuple[str, ...]:
        """Keyword arguments of `__call__`: `inputs`, "ids" with positives by id, and `guide_inputs` with a guide."""
        ids = ("ids",) if self.targets.by_id else ()
        return (*self.inputs, *ids, *(() if self.targets.guide is None else self.guide_inputs))

    def guide_options(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a loss function on its guide; none without one."""
        if self.targets.guide is None:
            return {}
        features = tuple(inputs[name] for name in self.guide_inputs)
        margin = self.targets.guide
        return {"guide": features, "margin": margin.value, "margin_strategy": margin.strategy}

    @property
    def axis_name(self) -> AxisName | None:
        """Mesh axes of the batch, slowest links first; None without a mesh."""
        if self.mesh is None:
            return None
        return self.mesh.axis_names if len(self.mesh.axis_names) > 1 else self.mesh.axis_names[0]

    @abc.abstractmethod
    def __call__(self, output: "CLIPOutput", **inputs: Any) -> LossOutput:
        """Compute the loss.

        Args:
          output: model output for the global batch, features `[b, D]`.
          **inputs: the arrays named in `batch_inputs`. `index`: int `[b]`, sample index of each row; `samples`: sample
            state, which is not modified; `step`: int32 scalar, number of completed steps; `ids`: int32 `[b, 2]`, id of
            each pair.
        """

    def init_samples(self, num_samples: int, init_logit_scale: float) -> SampleState | None:
        """Create the sample state; None for losses without it.

        Args:
          num_samples: number of samples in the dataset.
          init_logit_scale: initial parameter of the model, the logarithm of the inverse temperature.
        """
        del num_samples, init_logit_scale
        return None

    def write(self, samples: SampleState, index: Integer[Array, "b"], rows: SampleState) -> SampleState:
        """Write the new rows of a batch into the sample state.

        The update is in place if `samples` is donated.

        Args:
          samples: sample state of the whole dataset.
          index: int `[b]`, sample of each row.
          rows: new rows, `LossOutput.rows`.
        """
        return write_samples(samples, index, rows, axis_name=self.axis_name, mesh=self.mesh)
