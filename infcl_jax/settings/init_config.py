"""Settings of the initial parameters of a run."""

import dataclasses
from collections.abc import Sequence

from infcl_jax.schema import Section, setting
from infcl_jax.training.rules import check_pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitConfig(Section, prefix="init."):
    """Sources of initial parameters, which `infcl_jax.run` reads.

    The rules are ordered pairs (regular expression, name in the source). The expression matches the whole name of a
    parameter, such as "visual/proj/kernel", and the name can refer to its groups, as `\\1`. The first match applies.
    Other parameters have the same name in the source.

    Raises:
      ValueError: a rule is no pair of a regular expression and a name.
    """

    model: str | None = setting(
        None,
        "initial parameters of a new run: a folder, file or hf-hub:OWNER/NAME of OpenCLIP or Hugging Face, a model of "
        "OpenCLIP with its tag, as ViT-B-32:openai, a run's workdir or a checkpoint, see docs/weights.md; without "
        "model, the run has its model and tokenizer",
    )
    image: str | None = setting(None, "initial parameters of the image tower, like init.model")
    text: str | None = setting(None, "initial parameters of the text tower, like init.model")
    rules: Sequence[tuple[str, str]] = setting(
        (),
        'names in the source by parameter name, such as (("logit_scale", ""),); an empty name keeps the initial value',
    )

    def check(self) -> None:
        """Check the rules."""
        check_pairs("init.rules", self.rules, "a name", lambda name: isinstance(name, str))
