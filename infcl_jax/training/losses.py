"""Losses of the trainer by name, and settings of distillation, guided negatives and dense text retrieval."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.sharding import Mesh

from infcl_jax.losses import ClipLoss, Loss, SiglipLoss, retrieval_loss
from infcl_jax.losses.base import RETRIEVAL_TEACHER, LossOutput
from infcl_jax.losses.variants import VARIANTS
from infcl_jax.ops.common.checks import check_choice
from infcl_jax.ops.pairwise.lse import MARGIN_STRATEGIES
from infcl_jax.schema import Range, Section, setting
from infcl_jax.training.global_contrastive import GlobalContrastive

SELECTIONS = ("first", "random")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRetrievalConfig(Section, prefix="text_retrieval."):
    """Settings of dense text retrieval.

    Examples:
      >>> TextRetrievalConfig(hard_negatives=7, positive="random").query_length is None
      True

    Raises:
      ValueError: a value is out of range, or `corpus` and `questions` are not set together.
    """

    hard_negatives: int = setting(
        1,
        "hard negatives of each query in a batch, also negatives of the other queries; those that a query lacks are "
        "masked",
        Range(0, 1024),
        fixed=True,
    )
    positive: str = setting(
        "first",
        'positive and hard negatives of a query: the "first" ones of the file, or drawn at "random" in every epoch',
        SELECTIONS,
        fixed=True,
    )
    query_length: int | None = setting(
        None, "tokens of a query; None: as many as of a passage, text.context_length", Range(3, 2**16)
    )
    separator: str = setting(
        " ", 'text between the title and the text of a passage; " [SEP] " with tokenizers of BERT, as in DPR'
    )
    corpus: str | None = setting(
        None, "passages to search in evaluations, .tsv or .jsonl; None: no evaluation", evaluated=True
    )
    questions: str | None = setting(
        None,
        "questions of evaluations with answers, or queries with text_retrieval.judgments",
        evaluated=True,
    )
    judgments: str | None = setting(
        None,
        "relevant passages of the queries, in the columns of TREC or BEIR; None: questions have answers",
        evaluated=True,
    )

    def check(self) -> None:
        """Check that corpus and questions belong together."""
        if (self.corpus is None) != (self.questions is None):
            raise ValueError("expected text_retrieval.corpus and text_retrieval.questions together, got one; set both")
        if self.judgments is not None and self.corpus is None:
            raise ValueError("expected text_retrieval.corpus with text_retrieval.judgments, got None")


class RetrievalLoss(Loss):
    """`retrieval_loss` of queries against the passages of the global batch, as a training loss.

    The passages of a query are consecutive rows, the positive first. Each query has the passages of the other queries
    as negatives, their hard negatives included.
    """

    inputs: ClassVar[tuple[str, ...]] = ("passage_mask",)
    guide_inputs: ClassVar[tuple[str, ...]] = RETRIEVAL_TEACHER

    def __call__(self, output: Any, **inputs: Any) -> LossOutput:
        """Compute the loss of b queries and b * p passages; `passage_mask` [b * p] is False for padding."""
        queries, passages = output.query.shape[0], output.passage.shape[0]
        value = retrieval_loss(
            output.query,
            output.passage,
            output.logit_scale,
            labels=jnp.arange(queries, dtype=jnp.int32) * (passages // queries),
            axis_name=self.axis_name,
            mesh=self.mesh,
            passage_mask=inputs["passage_mask"],
            implementation=self.implementation,
            **self.guide_options(inputs),
        )
        return LossOutput(value)


LOSSES: dict[str, type[Loss]] = {
    "clip": ClipLoss,
    "siglip": SiglipLoss,
    **dict.fromkeys(VARIANTS, GlobalContrastive),
    "retrieval": RetrievalLoss,
}


def loss_class(name: str) -> type[Loss]:
    """Return the class of a loss.

    Examples:
      >>> loss_class("clip").__name__
      'ClipLoss'

    Raises:
      ValueError: the name is unknown.
    """
    check_choice("loss", name, tuple(LOSSES))
    return LOSSES[name]


def make_loss(
    name: str,
    mesh: Mesh | None,
    implementation: str | None = None,
    max_logit_scale: float | None = None,
    **settings: Any,
) -> Loss:
    """Create a training loss.

    Examples:
      >>> loss = make_loss("siglip", mesh)
      >>> type(loss).__name__
      'SiglipLoss'

    Args:
      name: key of `LOSSES`.
      mesh: devices over which the batch is sharded; None: one device.
      implementation: backend of `infcl_jax.pairwise_lse`; None: the best for the platform.
      max_logit_scale: limit of the model's logit scale; None: the limit of the loss, 100, or none with a sigmoid.
      **settings: settings of the run. `targets`, see `infcl_jax.losses.base.Targets`, are of losses over one batch;
        `config`, `steps_per_epoch` and `optimizer`, see `GlobalContrastive`, are of losses with sample state.

    Raises:
      ValueError: the name or implementation is unknown, or a setting is wrong. Calling the "siglip" loss on the output
        of a model without a logit bias also raises it.
    """
    loss = loss_class(name).create(name, mesh, implementation, **settings)
    return loss if max_logit_scale is None else dataclasses.replace(loss, max_logit_scale=max_logit_scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherConfig(Section):
    """Settings of a loss that reads the features of a frozen teacher.

    Raises:
      ValueError: a value is out of range, or a setting is changed without a teacher.
    """

    path_field: ClassVar[str]  # setting that names the teacher

    @property
    def path_setting(self) -> str:
        """Dotted name of the setting that names the teacher."""
        return self.prefix + self.path_field

    @property
    def path(self) -> str | None:
        """Path or name of the teacher; None without one."""
        return getattr(self, self.path_field)

    def check(self) -> None:
        """Check that there is a teacher if another setting needs it."""
        for field, declared in self.own_settings().items() if self.path is None else ():
            if (value := getattr(self, field)) != declared.default:
                raise ValueError(f"expected {self.path_setting} with {declared.name}={value!r}, got None; set it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig(TeacherConfig, prefix="distill."):
    """Settings of distillation, see `TeacherConfig`.

    Examples:
      >>> DistillConfig(teacher="runs/teacher", weight=0.5).cache is None
      True
    """

    path_field: ClassVar[str] = "teacher"

    teacher: str | None = setting(
        None, "model that infcl_jax.load reads, whose similarities the student learns; None: no distillation"
    )
    weight: float = setting(1.0, "weight of infcl_jax.distillation_loss in addition to the loss", Range(0, above=True))
    cache: str | None = setting(
        None,
        "folder for the features of the teacher, computed once per sample from the central square of its image; "
        '"workdir": in the work directory; None: the teacher encodes every batch as the student sees it',
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuideConfig(TeacherConfig, prefix="guide."):
    """Settings of guided negatives, see `TeacherConfig` and `infcl_jax.clip_loss`.

    Examples:
      >>> GuideConfig(model="runs/guide", margin=0.05).margin_strategy
      'absolute'
    """

    path_field: ClassVar[str] = "model"

    model: str | None = setting(
        None,
        "frozen model that infcl_jax.load reads; pairs that it finds more similar than a positive are no negatives of "
        "it; None: no guide",
    )
    margin: float = setting(0.0, "margin by which the similarity of a positive is lowered, see guide.margin_strategy")
    margin_strategy: str = setting(
        "absolute",
        'margin in units of the similarity ("absolute"), or of the absolute similarity of the positive ("relative")',
        MARGIN_STRATEGIES,
    )
    cache: str | None = setting(None, "folder for the features of the guide, like distill.cache")
