"""Report of a verification: errors by parameter group, causes and a figure."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class VerificationError(Exception):
    """A verification failed; the message is the report.

    Examples:
      >>> raise VerificationError("wrong: mean_over_chunks")
      Traceback (most recent call last):
      ...
      infcl_jax.verification.report.VerificationError: wrong: mean_over_chunks
    """


@dataclasses.dataclass(frozen=True)
class Cause:
    """Cause of a failed verification.

    Examples:
      >>> Cause("no_gradient", "text get no gradient").name
      'no_gradient'

    Attributes:
      name: a name in docs/verification.md, such as "mean_over_chunks"; "unknown" if no change explains the error.
      explanation: the evidence and the remedy.
    """

    name: str
    explanation: str


@dataclasses.dataclass(frozen=True)
class GroupError:
    """Error of the gradient of one parameter group.

    Examples:
      >>> half = GroupError("text", norm=1.1, error=0.5, factor=0.5)

    Attributes:
      name: name of the group.
      norm: norm of the reference gradient.
      error: norm of the difference, relative to `norm`, or to 1e-6 of the norm of all groups if that is larger.
      factor: least-squares factor of the gradient over the reference gradient; NaN for a reference of zero.
    """

    name: str
    norm: float
    error: float
    factor: float


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of `infcl_jax.verify`.

    Examples:
      >>> group = GroupError("text", norm=1.1, error=1e-7, factor=1.0)
      >>> report = Report(loss=3.2, expected_loss=3.2, loss_error=0.0, groups=(group,), rtol=1e-3)
      >>> print(report)
      group    reference  rel. error     factor
      loss           3.2     0.0e+00          1
      text           1.1     1.0e-07          1
      right: loss and gradients agree within 0.001

    Attributes:
      loss: loss of the set-up.
      expected_loss: loss of the undivided batch in float64.
      loss_error: relative error of the loss.
      groups: error of each trained parameter group.
      rtol: largest accepted relative error.
      causes: causes of the errors; empty if the set-up is right.
      notes: further remarks, which are not errors.
    """

    loss: float
    expected_loss: float
    loss_error: float
    groups: tuple[GroupError, ...]
    rtol: float
    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if loss, gradients and update are right."""
        return not self.causes

    @property
    def verdict(self) -> str:
        """One line: right, or the names of the causes."""
        if self.ok:
            return f"right: loss and gradients agree within {self.rtol:g}"
        return "wrong: " + ", ".join(cause.name for cause in self.causes)

    def __str__(self) -> str:
        """Format the table, the verdict and the explanations."""
        width = max(len(name) for name in ("group", "loss", *(group.name for group in self.groups)))
        lines = [f"{'group':<{width}}  {'reference':>11}  {'rel. error':>10}  {'factor':>9}"]
        loss_factor = self.loss / self.expected_loss if self.expected_loss else float("nan")
        rows = [("loss", self.expected_loss, self.loss_error, loss_factor)]
        rows += [(group.name, group.norm, group.error, group.factor) for group in self.groups]
        lines += [
            f"{name:<{width}}  {norm:>11.4g}  {error:>10.1e}  {factor:>9.4g}" for name, norm, error, factor in rows
        ]
        lines.append(self.verdict)
        lines += [f"  {cause.name}: {cause.explanation}" for cause in self.causes]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Plot the relative errors on a logarithmic axis.

        Args:
          path: file of the figure; None: not saved.
        """
        from matplotlib.figure import Figure

        names = ["loss", *(group.name for group in self.groups)]
        errors = [max(error, 1e-17) for error in (self.loss_error, *(group.error for group in self.groups))]
        figure = Figure(figsize=(6, 1 + 0.3 * len(names)))
        axes = figure.subplots()
        axes.barh(names, errors, color=["C0" if error <= self.rtol else "C3" for error in errors])
        axes.axvline(self.rtol, color="black", linewidth=1, linestyle="--")
        axes.set(xscale="log", xlabel="relative error", title=self.verdict)
        axes.invert_yaxis()
        figure.tight_layout()
        if path is not None:
            figure.savefig(path, dpi=100)
        return figure
