import re
from pathlib import Path

import numpy as np

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_runs_and_is_right():
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names = {}
    exec(example, names)
    image, text, loss = (np.asarray(names[name], np.float64) for name in ("image", "text", "loss"))
    logits = 14.3 * image @ text.T
    expected = (np.logaddexp.reduce(logits, 1) + np.logaddexp.reduce(logits, 0)) / 2 - np.diagonal(logits)
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-6)
    assert [g.shape for g in names["gradients"]] == [image.shape, text.shape, ()]
