"""The export: the same logits in a process without PyTorch, and a refusal of whatever is not an export."""

import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch

import export
import half_precision
import mlx_model
import mnist_data
import mnist_files
import torch_model
import training_report
from harness.cli import Fault
from harness.paths import ROOT
from harness.tolerances import compare

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A checkpoint with hostile statistics and its export: (model.pth, model.safetensors)."""
    folder = tmp_path_factory.mktemp("export")
    source, target = folder / "model.pth", folder / "model.safetensors"
    torch_model.save_checkpoint(mnist_files.random_model().state_dict(), source)
    export.export(source, target)
    return source, target


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(8).normal(size=(3, 28, 28, 1)).astype(np.float32)


def changed(target, tmp_path, arrays=None, metadata=None, drop=()):
    """A copy of an export with some arrays and metadata replaced."""
    stored, notes = mx.load(str(target), return_metadata=True)
    stored = {name: value for name, value in {**stored, **(arrays or {})}.items() if name not in drop}
    path = tmp_path / "changed.safetensors"
    notes = {name: value for name, value in {**notes, **(metadata or {})}.items() if value is not None}
    mx.save_safetensors(str(path), stored, notes)
    return path


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it raises
sys.path.insert(0, sys.argv[1])
import mlx.core as mx, numpy as np
import mlx_model
model = mlx_model.get_model(checkpoint=sys.argv[2])
np.save(sys.argv[4], np.array(model(mx.array(np.load(sys.argv[3])))))
assert sys.modules["torch"] is None
"""


def test_same_logits_in_a_process_without_torch(files, images, tmp_path):
    source, target = files
    np.save(tmp_path / "images.npy", images)
    paths = [ROOT / "scr", target, tmp_path / "images.npy", tmp_path / "logits.npy"]
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *map(str, paths)], check=True)
    logits = np.load(tmp_path / "logits.npy")
    assert np.array_equal(logits, np.array(mlx_model.get_model(checkpoint=source)(mx.array(images))))
    with torch.no_grad():
        model = torch_model.load_model(source).double()
        wanted = model(torch.from_numpy(images).double().permute(0, 3, 1, 2)).numpy()
    check = compare(logits, wanted, "float32")
    assert check["passed"], check["problem"]


@pytest.mark.parametrize("level", mlx_model.LEVELS)
def test_every_level_reads_both_formats(files, images, level):
    logits = [np.array(mlx_model.get_model(level, path)(mx.array(images))) for path in files]
    assert np.array_equal(*logits)


def test_format_is_told_by_content_not_by_name(files, tmp_path):
    disguised = tmp_path / "model.pth"
    disguised.write_bytes(files[1].read_bytes())
    assert mlx_model.count_params(mlx_model.get_model(checkpoint=disguised)) == 103_786


def test_metadata_tell_origin_and_layout(files, tmp_path):
    _, metadata = mlx_model.read_exported(files[1])
    assert metadata["layout"] == mlx_model.EXPORT_LAYOUT and metadata["format_version"] == "1"
    assert metadata["test_accuracy"] == metadata["data_source"] == "unknown"
    source = tmp_path / "model.pth"
    source.write_bytes(files[0].read_bytes())
    account = {
        "checkpoint_sha256": metadata["source_sha256"],
        "data_source": "here",
        "test_accuracy": 0.98765,
    }
    training_report.write_json(source.with_suffix(".json"), account)
    described = export.describe(source)
    assert (described["data_source"], described["test_accuracy"]) == ("here", "0.9877")
    training_report.write_json(source.with_suffix(".json"), account | {"checkpoint_sha256": "of another"})
    assert export.describe(source)["test_accuracy"] == "unknown"


def test_converting_twice_is_refused(files, tmp_path):
    with pytest.raises(Fault, match="exported already"):
        export.export(files[1], tmp_path / "twice.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"layout": None}, "layout is missing"),
        ({"layout": "PyTorch"}, "layout is PyTorch"),
        ({"format_version": "2"}, "format_version is 2"),
    ],
)
def test_layout_and_version_must_be_known(files, tmp_path, metadata, words):
    with pytest.raises(Fault, match=words):
        mlx_model.get_model(checkpoint=changed(files[1], tmp_path, metadata=metadata))


def test_missing_unexpected_and_wrongly_shaped_arrays_are_all_listed(files, tmp_path):
    arrays = {"other": mx.zeros(3), "fc.bias": mx.zeros(11)}
    path = changed(files[1], tmp_path, arrays, drop=["conv1.weight"])
    with pytest.raises(Fault) as fault:
        mlx_model.get_model(checkpoint=path)
    for words in ("missing: conv1.weight", "unexpected: other", "fc.bias is (11,) instead of (10,)"):
        assert words in str(fault.value)


def test_values_that_are_not_finite_are_named(files, tmp_path):
    path = changed(files[1], tmp_path, {"bn1.bias": mx.full((48,), float("inf"))})
    with pytest.raises(Fault, match=r"bn1\.bias holds a value that is not finite"):
        mlx_model.get_model(checkpoint=path)


def test_damaged_and_missing_files_are_refused(files, tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(Fault, match="does not exist"):
        mlx_model.load_exported(path, mlx_model.DepthwiseMNIST())
    path.write_bytes(files[1].read_bytes()[:5000])
    with pytest.raises(Fault, match="is damaged"):
        mlx_model.get_model(checkpoint=path)


def test_what_reads_back_differently_replaces_nothing(files, tmp_path, monkeypatch):
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"old")
    save = mx.save_safetensors

    def save_wrongly(path, arrays, metadata):
        save(path, {**arrays, "fc.bias": arrays["fc.bias"] + 1}, metadata)

    monkeypatch.setattr(export.mx, "save_safetensors", save_wrongly)
    with pytest.raises(Fault, match=r"read back differently \(fc\.bias\)"):
        export.export(files[0], target)
    assert target.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_another_suffix_is_refused(files, tmp_path):
    with pytest.raises(Fault, match=r"must be named \.safetensors"):
        export.export(files[0], tmp_path / "model.npz")


def through_a_file(arrays, tmp_path):
    """Arrays as they come back from an export."""
    path = tmp_path / "part.safetensors"
    export.write(path, arrays, {"format_version": "1", "layout": mlx_model.EXPORT_LAYOUT})
    return mlx_model.read_exported(path)[0]


@torch.no_grad()
def test_convolution_with_several_input_channels_per_group(tmp_path):
    conv = torch.nn.Conv2d(6, 8, (3, 5), stride=2, padding=(1, 2), groups=2).double()
    x = torch.randn(2, 6, 9, 11, dtype=torch.float64)
    weight = mlx_model.perm_conv(mx.array(conv.weight.float().numpy()))
    stored = through_a_file({"weight": weight, "bias": mx.array(conv.bias.float().numpy())}, tmp_path)
    result = mx.conv2d(
        mx.array(x.float().permute(0, 2, 3, 1).numpy()), stored["weight"], (2, 2), (1, 2), groups=2
    )
    check = compare(np.array(result + stored["bias"]), conv(x).permute(0, 2, 3, 1).numpy(), "float32")
    assert check["passed"], check["problem"]


@torch.no_grad()
def test_linear_after_a_flatten(tmp_path):
    linear = torch.nn.Linear(5 * 3 * 4, 7).double()
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    weight = mlx_model.perm_flat_linear(mx.array(linear.weight.float().numpy()), 5, 3, 4)
    stored = through_a_file({"weight": weight}, tmp_path)
    layer = nn.Linear(5 * 3 * 4, 7)
    layer.weight, layer.bias = stored["weight"], mx.array(linear.bias.float().numpy())
    flat = mx.array(x.float().permute(0, 2, 3, 1).numpy()).reshape(2, -1)  # NHWC, then flattened
    check = compare(np.array(layer(flat)), linear(x.flatten(1)).numpy(), "float32")
    assert check["passed"], check["problem"]


def test_cold_starts_are_timed_in_new_processes(files):
    starts = [export.cold_starts(path, 1)[0] for path in files]
    assert [start["imports_torch"] for start in starts] == [True, False]
    assert all(start["load"] > 0 and start["first_forward"] > 0 for start in starts)


def digits_of(count):
    images, labels = mnist_files.blobs(count, 4)
    return mnist_data.Digits(images, labels, images, labels, "blobs", {})


def test_half_precision_is_compared_on_the_whole_test_set(files):
    entries = half_precision.evaluate(files[0], digits_of(20), torch.device("cpu"))["entries"]
    kinds = {(entry["framework"].split(",")[0], entry["dtype"]) for entry in entries}
    assert kinds == {(f, d) for f in ("PyTorch", "MLX") for d in half_precision.DTYPES}
    for entry in entries:
        assert entry["images"] == 20
        low, high = {"float32": (0, 1e-3), "float16": (1e-5, 0.2), "bfloat16": (1e-4, 2)}[entry["dtype"]]
        assert low <= entry["largest_logit_difference"] <= high, entry


def test_comparison_by_hand():
    logits, wanted = np.array([[1.0, 2.0], [3.0, 1.0]]), np.array([[1.5, 1.0], [3.0, 1.0]])
    found = half_precision.compare("f", "d", "float16", logits, wanted, np.array([1, 1]))
    assert (found["accuracy"], found["changed_answers"], found["largest_logit_difference"]) == (0.5, 1, 1.0)


def overflowing(tmp_path, name):
    """A checkpoint that is fine in float32, and overflows float16 where the bias `name` is added."""
    state = mnist_files.random_model().state_dict()
    state[name] += 1e5
    torch_model.save_checkpoint(state, tmp_path / "model.pth")
    return tmp_path / "model.pth"


def test_overflow_in_torch_names_the_layer(tmp_path):
    path = overflowing(tmp_path, "stages.2.bn1.bias")
    with pytest.raises(Fault, match=r"PyTorch in float16: .* left layer stages\.2\.dw"):
        half_precision.evaluate(path, digits_of(2), torch.device("cpu"))


@pytest.mark.parametrize(
    ("level", "bias", "layer"),
    [
        ("folded", "conv1.1.bias", "conv1"),
        ("folded", "stages.2.bn1.bias", "stages.2.dw"),
        ("folded", "stages.0.skip.1.bias", "stages.0.skip"),
        ("network", "fc.bias", "fc"),  # the kernel's inner values are float32 and overflow nowhere
    ],
)
def test_overflow_in_mlx_names_the_layer(tmp_path, level, bias, layer, images):
    model = mlx_model.get_model(level, overflowing(tmp_path, bias), mx.float16)
    with pytest.raises(Fault, match=rf"MLX in float16: .* left layer {layer}\."):
        half_precision.mlx_logits(model, images)


def test_committed_export_is_of_the_committed_checkpoint():
    exported = ROOT / "output" / "best_model.safetensors"
    described = export.describe(ROOT / "output" / "best_model.pth")
    _, metadata = mlx_model.read_exported(exported)
    assert {key: metadata.get(key) for key in described} == described
    assert float(metadata["test_accuracy"]) >= training_report.GOAL
