import pickle
import tempfile

from infcl_jax.data.workers import WorkerFunction


class Add:
    def __init__(self, summands):
        self.summands = summands

    def __call__(self, number):
        return number + sum(self.summands)


def test_state_travels_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    function = WorkerFunction(Add(list(range(100_000))).__call__)
    pickled = [pickle.dumps(function) for _ in range(2)]
    assert len(pickled[0]) < 1000  # a pipe holds 64 KiB
    assert len(list(tmp_path.iterdir())) == 1
    assert [pickle.loads(data)(1) for data in pickled] == [function(1)] * 2
    del function
    assert not list(tmp_path.iterdir())
