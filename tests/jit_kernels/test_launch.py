"""Arguments reach the driver as the kernel expects them; a fake driver reads them back."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
import threading
import types

import pytest
import torch

from kiln.cache.disk.store import Store
from kiln.cache.env import Env
from kiln.jit_kernels import launch
from kiln.jit_kernels.compile import build
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.compile.ready import ReadyGuard
from kiln.jit_kernels.declare.errors import LateKernel, LaunchError, ToolchainMissing
from kiln.jit_kernels.declare.packing import ArgumentBlock
from kiln.jit_kernels.declare.spec import HOST_GPU, LaunchGeometry, needs_of
from kiln.jit_kernels.launch import LoadedKernel
from kiln.jit_kernels.launchers import choose
from kiln.jit_kernels.launchers.cuda_python import CudaPythonLauncher
from kiln.jit_kernels.launchers.cupy_module import CuPyLauncher
from kiln.jit_kernels.registry import all_specs, find_spec

KINDS = {
    "pointer": ctypes.c_void_p,
    "int64": ctypes.c_int64,
    "int32": ctypes.c_int32,
    "float": ctypes.c_float,
}


def read_back(address, kinds):
    """Decode the arguments as a driver does: an array of pointers, each to one argument."""
    pointers = (ctypes.c_void_p * len(kinds)).from_address(address)
    return [KINDS[k].from_address(p).value for k, p in zip(kinds, pointers, strict=True)]


class FakeDriver:
    """A fake of the functions of cuda.bindings.driver that Kiln calls."""

    def __init__(self, kinds, error=0):
        self.kinds, self.error, self.calls, self.loaded = kinds, error, [], []
        self.attributes, self.early, self.together, self.context = [], 0, 0, 1

    def cuCtxGetCurrent(self):
        return 0, self.context

    def cuModuleLoadData(self, cubin):
        self.loaded.append(cubin)
        return self.error, f"module {len(self.loaded)}"

    def cuModuleGetFunction(self, module, entry):
        return (500, None) if entry == b"absent" else (0, f"{entry.decode()} of {module}")

    class CUfunction_attribute:
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attributes.append((function, attribute, value))
        return (self.error,)

    class CUlaunchAttributeID:
        CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6

    class CUlaunchAttribute:
        def __init__(self):
            self.id, self.value = None, types.SimpleNamespace()

    class CUlaunchConfig:
        pass

    def cuLaunchKernelEx(self, config, function, address, extra):
        (attribute,) = config.attrs[: config.numAttrs]
        assert extra == 0
        if attribute.id == 2:
            assert attribute.value.cooperative == 1
            self.together += 1
        else:
            assert attribute.id == 6
            assert attribute.value.programmaticStreamSerializationAllowed == 1
            self.early += 1
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        rest = (*grid, *block, config.sharedMemBytes, config.hStream, address, extra)
        return self.cuLaunchKernel(function, *rest)

    def cuLaunchKernel(self, function, *rest):
        geometry, stream, address = rest[:7], rest[7], rest[8]
        self.calls.append((function, geometry, stream, read_back(address, self.kinds)))
        return (self.error,)

    def cuGetErrorName(self, error):
        return 0, b"CUDA_ERROR_INVALID_VALUE"

    def cuGetErrorString(self, error):
        return 0, b"invalid argument"


class FakeCuPy:
    """A fake of the parts of cupy.cuda that Kiln calls."""

    class Error(Exception):
        pass

    def __init__(self, kinds, error=0):
        self.kinds, self.error, self.calls, self.loaded = kinds, error, [], []
        self.attributes, self.together = [], 0
        names = types.SimpleNamespace
        fake = self

        class Module:
            def load(self, cubin):
                fake.loaded.append(cubin)
                fake.fail()

            def get_function(self, entry):
                if entry == "absent":
                    raise fake.Error("CUDA_ERROR_NOT_FOUND")
                return names(ptr=f"{entry} of module {len(fake.loaded)}", module=self)

        self.function = names(Module=Module)
        self.driver = names(
            launchKernel=self.launch,
            launchCooperativeKernel=self.launch_together,
            funcSetAttribute=lambda *asked: (self.attributes.append(asked), self.fail()),
            CUDADriverError=self.Error,
        )
        self.runtime = names(CUDARuntimeError=self.Error)

    def fail(self):
        if self.error:
            raise self.Error("CUDA_ERROR_INVALID_VALUE: invalid argument")

    def launch(self, function, *rest):
        geometry, stream, address, extra = rest[:7], rest[7], rest[8], rest[9]
        assert extra == 0
        self.calls.append((function, geometry, stream, read_back(address, self.kinds)))
        self.fail()

    def launch_together(self, function, *rest):
        self.together += 1
        self.launch(function, *rest, 0)


LAUNCHERS = {"cuda-python": (CudaPythonLauncher, FakeDriver), "cupy": (CuPyLauncher, FakeCuPy)}


@pytest.fixture(params=LAUNCHERS)
def make(request):
    """Return a launcher with a fake of its library, and the fake."""
    launcher, fake = LAUNCHERS[request.param]

    def made(kinds, error=0):
        library = fake(kinds, error)
        return launcher(library), library

    return made


def test_a_kernel_may_have_the_shared_memory_that_it_asks_for(make):
    launcher, driver = make(())
    function = launcher.load("name", b"cubin", "entry", 100_000)
    handle = function.ptr if isinstance(launcher, CuPyLauncher) else function.function
    assert driver.attributes == [(handle, 8, 100_000)]
    launcher.load("name", b"cubin", "entry")
    assert len(driver.attributes) == 1, "what fits in 48 KiB needs no leave"


def test_too_much_shared_memory_is_told_with_its_size():
    driver = FakeDriver(())
    launcher = CudaPythonLauncher(driver)
    driver.cuFuncSetAttribute = lambda *asked: (1,)
    with pytest.raises(LaunchError, match="norm: a block cannot have 300000 bytes"):
        launcher.load("norm", b"cubin", "entry", 300_000)


@pytest.mark.parametrize("spec", all_specs().values(), ids=lambda spec: spec.name)
def test_every_kernels_arguments_arrive(spec, make):
    launcher, driver = make(spec.c_types)
    function = launcher.load(spec.name, b"cubin", spec.entry)
    assert driver.loaded == [b"cubin"]
    kernel = LoadedKernel(spec.name, function, spec.c_types, launcher)
    wanted = 0
    for sizes in spec.sizes:
        a = spec.make_arguments(next(iter(spec.variants())), sizes, "cpu")
        bound = spec.bind(a)
        values = spec.kernel_values(a, bound)
        geometry = spec.geometry(bound.variant, bound.sizes, HOST_GPU)
        kernel.launch(geometry, values, 77)
        if 0 in geometry.grid:
            continue
        wanted += 1
        function, launched, stream, seen = driver.calls[-1]
        assert (function, stream) == (f"{spec.entry} of module 1", 77)
        assert launched == (*geometry.grid, *geometry.block, geometry.shared_bytes)
        for got, value in zip(seen, values, strict=True):
            want = value.data_ptr() if isinstance(value, torch.Tensor) else value
            # A null pointer reads as None; approx compares a bool by identity.
            assert (got or 0) == pytest.approx(float(want or 0), rel=1e-6)
    assert len(driver.calls) == wanted, "an empty grid is never launched"


def test_offsets_beyond_32_bits_are_kept():
    block = ArgumentBlock(["int64", "int32", "float", "pointer"])
    address = block.pack([2**40 + 3, -5, 0.5, 2**63 + 1])
    assert read_back(address, ["int64", "int32", "float", "pointer"]) == [
        2**40 + 3, -5, 0.5, 2**63 + 1,
    ]  # fmt: skip


def test_each_thread_packs_its_own_block():
    block = ArgumentBlock(["int64"])
    addresses = {block.pack([1])}

    def work():
        addresses.add(block.pack([2]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(addresses) == 2
    assert read_back(block.address, ["int64"]) == [1]


def test_a_refusal_says_what_and_why(make):
    launcher, _ = make(["int64"], error=1)
    kernel = LoadedKernel("rms_norm", SimpleFunction(), ["int64"], launcher)
    with pytest.raises(LaunchError, match=r"rms_norm.*CUDA_ERROR_INVALID_VALUE"):
        kernel.launch(LaunchGeometry((1, 1, 1), (32, 1, 1)), [1], 0)
    with pytest.raises(LaunchError, match=r"rms_norm.*refused the cubin.*INVALID_VALUE"):
        launcher.load("rms_norm", b"cubin", "rms_norm")
    with pytest.raises(LaunchError, match=r"no entry 'absent'"):
        make(["int64"])[0].load("rms_norm", b"cubin", "absent")


class SimpleFunction:
    ptr, function = 0, 0

    def may_start_early(self, stream):
        return False


@pytest.mark.parametrize("hint", ["pdl_wait_then_trigger", ""])
def test_blocks_that_must_run_together_are_launched_so_and_never_early(make, hint):
    launcher, driver = make(["int64"])
    function = launcher.load("sum", b"cubin", "entry", early_hint=hint)
    kernel = LoadedKernel("sum", function, ["int64"], launcher)
    kernel.launch(LaunchGeometry((3, 2, 1), (64, 4, 1), 900, cooperative=True), [5], 77)
    assert (driver.together, getattr(driver, "early", 0)) == (1, 0)
    assert driver.calls[0][1:] == ((3, 2, 1, 64, 4, 1, 900), 77, [5])


def test_a_kernel_that_waits_by_itself_is_launched_early():
    driver = FakeDriver(["int64"])
    launcher = CudaPythonLauncher(driver)
    geometry = LaunchGeometry((3, 2, 1), (64, 4, 1), 900)
    for hint in ("pdl_wait_then_trigger", ""):
        function = launcher.load("norm", b"cubin", "entry", early_hint=hint)
        LoadedKernel("norm", function, ["int64"], launcher).launch(geometry, [5], 77)
    early, late = driver.calls
    assert early[1:] == late[1:] == ((3, 2, 1, 64, 4, 1, 900), 77, [5])
    assert driver.early == 1


PLAN, READER, NORM, PLAIN = "pdl_writes_plan", "pdl_reads_plan", "pdl_wait_then_trigger", ""


@pytest.mark.parametrize(
    ("launches", "early"),
    [
        ([(PLAN, 7), (READER, 7)], [True, False]),
        ([(PLAN, 7), (PLAN, 7), (READER, 7), (READER, 7)], [True, True, False, True]),
        ([(PLAN, 7), (NORM, 7), (READER, 7)], [True, True, True]),
        ([(PLAN, 7), (PLAIN, 7), (READER, 7)], [True, False, True]),
        ([(PLAN, 7), (NORM, 8), (READER, 8), (READER, 7)], [True, True, True, False]),
    ],
)
def test_right_behind_its_plan_a_reader_is_not_launched_early(launches, early):
    driver = FakeDriver([])
    launcher, geometry, seen = CudaPythonLauncher(driver), LaunchGeometry((1, 1, 1), (32, 1, 1)), []
    functions = {
        name: launcher.load(name, b"cubin", "entry", early_hint=name)
        for name in (PLAN, READER, NORM, PLAIN)
    }
    for name, stream in launches:
        before = driver.early
        LoadedKernel(name, functions[name], [], launcher).launch(geometry, [], stream)
        seen.append(driver.early > before)
    assert seen == early


def test_a_stream_of_another_device_is_another_stream():
    driver = FakeDriver([])
    launcher = CudaPythonLauncher(driver)
    plan = launcher.load("plan", b"cubin", "entry", early_hint=PLAN)
    reader = launcher.load("reader", b"cubin", "entry", early_hint=READER)
    driver.context = 2
    norm = launcher.load("norm", b"cubin", "entry", early_hint=NORM)
    assert [one.may_start_early(0) for one in (plan, norm, reader)] == [True, True, False]


def test_each_thread_has_a_configuration_of_its_own():
    launcher, seen = CudaPythonLauncher(FakeDriver([])), []
    thread = threading.Thread(target=lambda: seen.append(launcher._configs.early))
    thread.start()
    thread.join()
    assert seen[0] is not launcher._configs.early


@pytest.mark.parametrize(("arch", "early"), [("sm_90a", True), ("sm_89", False)])
def test_whether_a_loaded_kernel_may_start_early_depends_on_the_gpu(cuda, monkeypatch, arch, early):
    monkeypatch.setattr(launch, "device_arch", lambda device: arch)
    spec = find_spec("apply_rotary")
    launch.load_kernels([spec], torch.device("cuda", 0), needs_of(torch.bfloat16))
    ((kernel, _),) = launch._loaded(0).values()
    assert bool(kernel._function.early_hint) is early


@pytest.mark.parametrize("make", [CudaPythonLauncher, CuPyLauncher])
def test_the_toggle_names_the_launcher(monkeypatch, make):
    monkeypatch.setattr(choose, "settings", lambda: Env(launcher=make.name))
    assert isinstance(choose.launcher.__wrapped__(), make)


@pytest.mark.parametrize(
    ("capability", "make"), [((9, 0), CudaPythonLauncher), ((8, 9), CuPyLauncher)]
)
def test_by_default_launches_come_early_where_a_gpu_has_that(monkeypatch, capability, make):
    monkeypatch.setattr(choose, "settings", lambda: Env())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert isinstance(choose.launcher.__wrapped__(), make)


def test_without_early_launches_the_faster_of_those_installed_launches(monkeypatch, caplog):
    monkeypatch.setattr(choose, "settings", lambda: Env())
    monkeypatch.setattr(choose, "_has_early_launches", lambda: False)
    assert isinstance(choose.launcher.__wrapped__(), CuPyLauncher)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with caplog.at_level("INFO", "kiln"):
        assert isinstance(choose.launcher.__wrapped__(), CudaPythonLauncher)
    assert "CuPy cannot be loaded" in caplog.text


def test_without_cuda_python_cupy_launches_on_any_gpu(monkeypatch, caplog):
    monkeypatch.setattr(choose, "settings", lambda: Env())
    monkeypatch.setattr(choose, "_has_early_launches", lambda: True)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with caplog.at_level("INFO", "kiln"):
        assert isinstance(choose.launcher.__wrapped__(), CuPyLauncher)
    assert "through cupy: cuda-bindings cannot be loaded" in caplog.text


def test_a_launcher_that_is_named_and_not_installed_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(choose, "settings", lambda: Env(launcher="cupy"))
    with pytest.raises(ToolchainMissing, match="CuPy"):
        choose.launcher.__wrapped__()


def test_cupy_has_what_the_launcher_calls():
    cupy = pytest.importorskip("cupy")
    launcher = CuPyLauncher(cupy.cuda)
    with pytest.raises(LaunchError, match="silu_and_mul"):
        launcher.load("silu_and_mul", b"not a cubin", "act_and_mul")  # or there is no driver


@pytest.fixture
def cuda(monkeypatch):
    """A fake driver, on a machine that seems to have a GPU when kernels are loaded."""
    driver = FakeDriver(["pointer"])
    monkeypatch.setattr(launch, "launcher", lambda: CudaPythonLauncher(driver))
    monkeypatch.setattr(launch, "kernel_cache", lambda: KernelCache(Store(None)))
    monkeypatch.setattr(launch, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(launch, "_loaded", functools.cache(lambda index: {}))
    monkeypatch.setattr(launch, "gpu", lambda index: HOST_GPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return driver


def test_only_the_variants_of_the_models_dtype_are_loaded(cuda):
    spec, device = find_spec("rms_norm"), torch.device("cuda", 0)
    launch.load_kernels([spec], device, needs_of(torch.bfloat16))
    assert [kernel.name for kernel, _ in launch._loaded(0).values()] == ["rms_norm[bf16]"]
    launch.load_kernels([spec], device)
    assert len(launch._loaded(0)) == len(cuda.loaded) == 3, "each once"


def test_a_load_inside_a_capture_is_refused_before_the_driver_is_asked(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(LateKernel, match=r"rms_norm\[.*captured"):
        launch.load_kernels([find_spec("rms_norm")], torch.device("cuda", 0))
    assert not cuda.loaded


@pytest.mark.parametrize("policy", ["warn", "error"])
def test_a_load_after_ready_is_told_by_name(cuda, monkeypatch, policy, caplog):
    def said():
        return [
            r.getMessage() for r in caplog.records if r.name == "kiln.jit_kernels.compile.ready"
        ]

    guard = ReadyGuard(policy)
    for module in (launch, build):
        monkeypatch.setattr(module, "ready_guard", lambda: guard)
    spec, device = find_spec("rms_norm"), torch.device("cuda", 0)
    launch.load_kernels([spec], device, needs_of(torch.float16))
    guard.declare_ready()
    launch.load_kernels([spec], device, needs_of(torch.float16))
    assert not said(), "what is loaded already is no load"
    if policy == "error":
        with pytest.raises(LateKernel, match=r"rms_norm\[bf16\] for sm_90a is compiled after"):
            launch.load_kernels([spec], device, needs_of(torch.bfloat16))
        assert [kernel.name for kernel, _ in launch._loaded(0).values()] == ["rms_norm[fp16]"]
        return
    launch.load_kernels([spec], device, needs_of(torch.bfloat16))
    compiled, loaded = said()
    assert "rms_norm[bf16] for sm_90a is compiled" in compiled
    assert "rms_norm[bf16] is loaded" in loaded
    with guard.preparing():
        launch.load_kernels([spec], device, needs_of(torch.float32))
    assert len(said()) == 2, "one more engine in this process is no accident"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("make", [CudaPythonLauncher, CuPyLauncher])
def test_a_kernel_runs_on_the_gpu_through_each_launcher(make):
    spec, launcher, device = find_spec("rms_norm"), make(), torch.device("cuda", 0)
    a = spec.make_arguments({"scalar_t": "float"}, {"rows": 33, "d": 1000}, "cuda")
    bound = spec.bind(a)
    cache = KernelCache(Store(None))
    cubin = build.build(spec, bound.variant, launch.target_arch(device), cache).cubin
    torch.cuda.synchronize()
    function = launcher.load("rms_norm", cubin, spec.entry)
    kernel = LoadedKernel("rms_norm", function, spec.c_types, launcher)
    stream = torch.cuda.current_stream().cuda_stream
    values = spec.kernel_values(a, bound)
    kernel.launch(spec.geometry(bound.variant, bound.sizes, HOST_GPU), values, stream)
    torch.testing.assert_close(a.out, spec.reference(a)["out"], rtol=1e-5, atol=1e-5)
    with pytest.raises(LaunchError, match="rms_norm"):
        kernel.launch(LaunchGeometry((1, 1, 1), (2048, 1, 1)), values, stream)
    with pytest.raises(LaunchError, match="no entry"):
        launcher.load("rms_norm", cubin, "absent")
    with pytest.raises(LaunchError, match="refused the cubin"):
        launcher.load("rms_norm", b"\0" * 256, spec.entry)


def test_the_current_stream_is_asked_of_torch(monkeypatch):
    asked = types.SimpleNamespace(cuda_stream=123)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: asked)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)
    assert launch._current_stream.__wrapped__()(0) == 123
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 40 + index)
    assert launch._current_stream.__wrapped__()(2) == 42


class Stream:
    """A stream and a capture stream: which launches reach the device, in which order, and how.

    As if a graph's edge were no barrier: its first kernel could start early behind what was
    launched before the replay, and an eager kernel behind the graph's last one.
    """

    def __init__(self, hear):
        self.launcher, self.hear = CudaPythonLauncher(FakeDriver([])), hear
        self.functions = {
            name: self.launcher.load(name, b"cubin", "entry", early_hint=name)
            for name in (PLAN, READER, NORM)
        }
        self.ran = []  # (hint, whether it was launched early)

    def launch(self, name, stream=1):
        self.ran.append((name, self.functions[name].may_start_early(stream)))

    def capture(self, names):
        """Launch kernels on the capture stream, as a first run does, and then capture them."""
        for name in names:
            self.launch(name, stream=2)
        before = len(self.ran)
        self.edge(2)
        for name in names:
            self.launch(name, stream=2)
        self.edge(2)
        captured, self.ran[before:] = self.ran[before:], []
        return captured

    def replay(self, captured):
        self.ran += captured
        self.edge(1)

    def edge(self, stream):
        if self.hear:
            self.launcher.at_graph_edge(stream)

    def is_safe(self):
        """Whether no reader was launched early directly behind a plan."""
        return all(
            pair != ((PLAN, pair[0][1]), (READER, True)) for pair in itertools.pairwise(self.ran)
        )


def safe_programs(hear):
    """Return for every short program of launches and replays whether it is safe."""
    kernels = (PLAN, READER, NORM)
    graphs = [names for count in (1, 2) for names in itertools.product(kernels, repeat=count)]
    found = {}
    for program in itertools.product([*kernels, *graphs], repeat=3):
        stream = Stream(hear)
        captured = {names: stream.capture(names) for names in graphs if names in program}
        stream.ran.clear()  # what ran on the other stream has ended
        for step in program:
            if step in captured:
                stream.replay(captured[step])
            else:
                stream.launch(step)
        found[program] = stream.is_safe()
    return found


def test_no_reader_starts_early_behind_a_plan_on_the_other_side_of_a_graphs_edge():
    assert all(safe_programs(hear=True).values())
    unheard = safe_programs(hear=False)
    assert not unheard[NORM, (PLAN,), READER], "a plan in a graph, attention behind it"
    assert not unheard[NORM, PLAN, (READER,)], "a plan ahead of a graph with attention"
    assert unheard[PLAN, NORM, (READER,)]
    assert all(unheard[program] for program in itertools.product((PLAN, READER, NORM), repeat=3))


def test_a_capture_uses_up_no_plan_that_was_launched():
    """A captured kernel does not run: what is launched next is still right behind the plan."""
    stream = Stream(hear=True)
    stream.capture([NORM])
    stream.launch(PLAN, stream=2)
    stream.capture([NORM])
    stream.ran.clear()
    stream.launch(READER, stream=2)
    assert stream.ran == [(READER, False)]


def test_inside_a_graph_kernels_start_early_as_elsewhere():
    stream = Stream(hear=True)
    captured = stream.capture([NORM, READER])
    assert captured == [(NORM, True), (READER, True)]
    stream.launch(NORM)
    stream.replay(captured)
    stream.launch(NORM)
    assert all(early for _, early in stream.ran)


def test_the_launcher_hears_of_edges_on_the_current_stream(cuda, monkeypatch):
    heard = []
    monkeypatch.setattr(CudaPythonLauncher, "at_graph_edge", lambda self, at: heard.append(at))
    monkeypatch.setattr(launch, "_current_stream", lambda: lambda index: 40 + index)
    launch.at_graph_edge(torch.device("cuda", 0))
    assert not heard, "before any kernel is loaded there is nothing to tell"
    launch.load_kernels([find_spec("rms_norm")], torch.device("cuda", 0), needs_of(torch.bfloat16))
    launch.at_graph_edge(torch.device("cuda", 0))
    assert heard == [40]
