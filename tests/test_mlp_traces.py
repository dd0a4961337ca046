"""The trace reader: nesting, self times, kernels, copies, idle time, names; on made and stored traces."""

import gzip
import json
from pathlib import Path

import pytest

from harness.cli import Fault
from mlp import traces

DATA = Path(__file__).parent / "data"


def event(category, name, start, duration, tid=1, **arguments):
    """One complete event as the profiler exports it."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 9,
        "tid": tid,
        "ts": 1e9 + start,
        "dur": duration,
    } | {"args": arguments}


def trace_of(*events):
    return traces.from_events(traces.slim({"traceEvents": list(events)})["traceEvents"])


GPU = (
    event("user_annotation", "ProfilerStep#2", 0, 100),
    event("cpu_op", "aten::linear", 0, 30),
    event("cpu_op", "aten::t", 1, 4),
    event("cpu_op", "aten::transpose", 2, 2),
    event("cpu_op", "aten::addmm", 6, 20),
    event("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=1),
    event("cpu_op", "aten::copy_", 40, 10),
    event("cuda_runtime", "cudaMemcpyAsync", 42, 6, correlation=2),
    event("cuda_runtime", "cudaDeviceSynchronize", 60, 40),
    event("kernel", "ampere_sgemm_128x64_tn", 20, 30, tid=7, stream=7, correlation=1),
    event("kernel", "void at::native::vectorized_elementwise_kernel<4>", 40, 20, tid=8, stream=8),
    event("gpu_memcpy", "Memcpy DtoD", 70, 10, tid=7, stream=7, correlation=2),
    event("python_function", "forward", 0, 100),
)


def test_self_time_is_what_children_leave():
    spans = {span.name: span for span in trace_of(*GPU).spans}
    assert spans["aten::linear"].self_time == pytest.approx(30 - 4 - 20)
    assert spans["aten::t"].self_time == pytest.approx(2)
    assert spans["aten::addmm"].self_time == pytest.approx(15)
    assert spans["cudaLaunchKernel"].parent is spans["aten::addmm"]
    cpu = [span for span in spans.values() if span.lane != "gpu"]
    assert sum(span.self_time for span in cpu) == pytest.approx(100)  # nothing twice, nothing lost


def test_streams_that_overlap_count_once_and_copies_count():
    summary = traces.summarize(trace_of(*GPU))
    assert summary.device == "gpu"
    assert summary.busy_us == pytest.approx(40 + 10)  # 20–60 on two streams, 70–80
    assert summary.idle_share == pytest.approx(0.5)
    assert summary.kernels == {"gemm": 1, "pointwise": 1, "memcpy": 1}
    assert (summary.kernel_count, summary.copies, summary.launches, summary.graph_launches) == (2, 1, 1, 0)
    assert traces.gaps(trace_of(*GPU)) == [(0, 20), (60, 70), (80, 100)]


def test_operators_that_launch_nothing_are_told_from_those_that_do():
    empty = traces.summarize(trace_of(*GPU)).empty_operators
    assert empty == ["aten::t", "aten::transpose"]


def test_device_work_after_the_last_step_is_in_the_window():
    late = event("kernel", "triton_poi_fused_0", 90, 60, tid=7, stream=7)
    assert trace_of(*GPU, late).window() == (0, 150)


def test_a_graph_launch_is_one_launch_of_many_kernels():
    summary = traces.summarize(
        trace_of(
            event("user_annotation", "ProfilerStep#2", 0, 50),
            event("cuda_runtime", "cudaGraphLaunch", 1, 5),
            event("kernel", "nvjet_hsh_64x8_64x16_1x2_h_bz_TNT", 8, 10, tid=7, stream=7),
            event("kernel", "triton_poi_fused_addmm_relu_0", 20, 5, tid=7, stream=7),
        )
    )
    assert (summary.graph_launches, summary.launches) == (1, 0)
    assert summary.kernels == {"gemm": 1, "fused": 1}


def test_a_cpu_product_and_the_copy_inside_it_share_no_time():
    summary = traces.summarize(
        trace_of(
            event("user_annotation", "ProfilerStep#2", 0, 60),
            event("user_annotation", "ProfilerStep#3", 60, 60),
            event("cpu_op", "aten::linear", 0, 40),
            event("cpu_op", "aten::t", 1, 2),
            event("cpu_op", "aten::addmm", 5, 30),
            event("cpu_op", "aten::expand", 6, 1),
            event("cpu_op", "aten::copy_", 8, 10),
            event("cpu_op", "aten::relu", 45, 10),
            event("cpu_op", "aten::clamp_min", 46, 8),
        )
    )
    assert summary.kernels == {"gemm": 0.5, "copy": 0.5, "pointwise": 0.5}  # two steps, work in one
    assert summary.kernel_us == {"aten::addmm": 10, "aten::copy_": 5, "aten::clamp_min": 4}
    assert summary.idle_share == pytest.approx(1 - 38 / 120)


def test_the_stored_cpu_trace_of_a_compiled_geglu():
    path = DATA / "mlp_cpu_trace.json.gz"
    assert path.stat().st_size < 50_000
    summary = traces.summarize(traces.read(path))
    assert (summary.device, summary.steps) == ("cpu", 3)
    assert summary.kernels == {"gemm": 3, "fused": 1}
    assert [name for name in summary.names if "cpp_fused_gelu_mul" in name]
    assert 0 < summary.guard_us < summary.step_us
    assert summary.busy_us < summary.step_us


def test_the_stored_gpu_trace_of_a_replayed_graph():
    """An H200, fp16 MLP of three layers under reduce-overhead."""
    summary = traces.summarize(traces.read(DATA / "mlp_gpu_graph_trace.json.gz"))
    assert (summary.device, summary.steps) == ("gpu", 3)
    assert summary.kernels == {"gemm": 3, "fused": 3, "copy": 1}
    assert (summary.graph_launches, summary.launches) == (1, 1)  # the copy of the input is apart
    assert 0.9 < summary.idle_share < 1
    gemm = next(name for name in summary.names if traces.is_gemm(name))
    assert traces.decode_gemm(gemm) == traces.GemmName("tn", "24x64x64", "nvjet")


def test_the_stored_gpu_trace_of_a_training_step():
    """An H200, fp32: the library adds kernels around the products; the backward is another thread."""
    trace = traces.read(DATA / "mlp_gpu_training_trace.json.gz")
    summary = traces.summarize(trace)
    assert {kind: n for kind, n in summary.kernels.items() if kind != "memset"} == {
        "gemm": 8,
        "gemm helper": 8,
        "pointwise": 6,
        "reduction": 3,
    }
    assert summary.launches == summary.kernel_count
    assert summary.busy_us == pytest.approx(sum(summary.kernel_us.values()), rel=1e-6)  # one stream
    assert len({span.thread for span in trace.lane("cpu")}) == 2
    assert all(span.self_time >= -0.01 for span in trace.spans)


def test_a_stored_trace_names_no_machine(tmp_path):
    exported = tmp_path / "exported.json"
    document = {"host_name": "secret", "traceName": "/home/secret/x.json", "traceEvents": list(GPU)}
    exported.write_text(json.dumps(document))
    traces.store(exported, tmp_path / "small.json.gz")
    text = gzip.decompress((tmp_path / "small.json.gz").read_bytes()).decode()
    assert "secret" not in text and "python_function" not in text
    again = traces.summarize(traces.read(tmp_path / "small.json.gz"))
    assert again == traces.summarize(trace_of(*GPU))


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"not json", gzip.compress(b'{"traceEvents": 3}')])
def test_a_file_that_is_no_trace_is_refused_in_one_sentence(tmp_path, content):
    path = tmp_path / ("trace.json.gz" if content.startswith(b"\x1f") else "trace.json")
    path.write_bytes(content)
    with pytest.raises(Fault, match="no Chrome trace"):
        traces.read(path)


def test_a_missing_trace_and_one_without_steps_are_refused(tmp_path):
    with pytest.raises(Fault, match="does not exist"):
        traces.read(tmp_path / "none.json.gz")
    with pytest.raises(Fault, match="no profiled step"):
        trace_of(event("cpu_op", "aten::mm", 0, 1))


@pytest.mark.parametrize(
    ("name", "layout", "tile", "family"),
    [
        ("ampere_sgemm_128x64_tn", "tn", "128x64", "gemm"),
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", "tn", "128x256", "gemm"),
        ("nvjet_tst_192x192_64x3_2x1_v_bz_coopB_TNN", "tn", "192x192x64", "nvjet"),
        ("nvjet_hsh_64x8_64x16_1x2_h_bz_TNT", "tn", "64x8x64", "nvjet"),
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(Params)",
            "nn",
            "128x64x8",
            "cutlass",
        ),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_kernel__5x_cublas",
            "tn",
            "64x64x8",
            "xmma",
        ),
        ("void gemmSN_TN_kernel<float, 128, 16>", "tn", None, "gemm"),
        ("two_layer_kernel", None, None, "unknown"),
    ],
)
def test_what_a_gemm_name_says(name, layout, tile, family):
    assert traces.is_gemm(name)
    assert traces.decode_gemm(name) == traces.GemmName(layout, tile, family)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cublasLt::splitKreduce_kernel<32, 16>", "gemm helper"),
        ("triton_poi_fused_gelu_mul_0", "fused"),
        ("triton_per_fused_native_layer_norm_0", "fused"),
        ("triton_tem_fused_mm_0", "gemm"),
        ("_geglu_tanh_forward_kernel", "fused"),
        ("geglu_kernel", "fused"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>", "norm"),
        ("void at::native::reduce_kernel<128, 4>", "reduction"),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", "copy"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>", "copy"),
        ("sm80_xmma_gemm_f32f32_tn_n_tilesize64x64x8_execute_split_k_kernel__5x_cublas", "gemm helper"),
        ("void scal_kernel<float>(cublasTransposeParams<float>)", "gemm helper"),
        ("void at::native::multi_tensor_apply_kernel<at::native::Copy<c10::Half, c10::Half> >", "copy"),
        ("something_else", "other"),
    ],
)
def test_kinds_of_kernels(name, kind):
    span = traces.Span(name, "gpu", "kernel", "stream 7", 0, 1)
    assert traces.kernel_kind(span) == kind


def test_union_of_intervals():
    assert traces.union_us([(0, 2), (1, 3), (5, 6), (5.5, 5.6)]) == pytest.approx(4)
    assert traces.union_us([]) == 0
