import pickle
import re

import pytest

from dsc import errors

CASES = [
    (
        errors.UnknownOption("numeric", ("numerics", "emit")),
        "'numeric' is not an option of dsc; did you mean 'numerics'?",
    ),
    (errors.UnknownOption("zzz", ("b", "a")), "'zzz' is not an option of dsc; use one of 'a', 'b'."),
    (errors.UnknownOption("n", (), "pass 'fuse'"), "'n' is not an option of pass 'fuse'; there is none to choose."),
    (errors.BadOption("emit", "rust", "'cpp' or 'triton'"), "Option 'emit' cannot be 'rust'; give 'cpp' or 'triton'."),
    (errors.UnknownFormat("fp9", ("fp8", "bf16")), "'fp9' is not a format of matrix products; did you mean 'fp8'?"),
    (
        errors.BadControl("'back' is no role", "use 'backward'"),
        "The precision controller refuses: 'back' is no role; use 'backward'.",
    ),
    (errors.BadPrecision(3, "a format"), "Option 'precision' cannot be 3; give a format."),
    (
        errors.NoSuchLayer("*.attn", ("a.q", "b")),
        "The precision pattern '*.attn' matches no layer with a matrix product; there are 'a.q', 'b'.",
    ),
    (errors.NotOnTarget("fp8", "a100", "int8"), "a100 cannot compute in fp8; use int8."),
    (
        errors.BadCalibration("the gradient is zero", "give data"),
        "Precision cannot be calibrated: the gradient is zero; give data.",
    ),
    (
        errors.ErrorBudgetTooSmall(1e-4, 0.00312),
        "An error budget of 0.0001 cannot be met: the most exact formats of the candidates err by 0.00312; "
        "give more than that, or leave precision out.",
    ),
    (
        errors.BadPrecisionPlan("p.json", "it is empty"),
        "The precision plan in p.json cannot be used: it is empty; delete it to calibrate anew.",
    ),
    (
        errors.BadState("m", "is int64[2]", "give the model its own State"),
        "State entry 'm' is int64[2]; give the model its own State.",
    ),
    (errors.UnknownTarget("H10", ("h100",)), "'H10' is not a target that dsc knows; did you mean 'h100'?"),
    (
        errors.BadArtifact("out", "it has no manifest.json", "give a folder that dsc compile wrote"),
        "out cannot be loaded: it has no manifest.json; give a folder that dsc compile wrote.",
    ),
    (
        errors.Unsaveable("net", "its sizes are symbols"),
        "net cannot be saved: its sizes are symbols; compile it where it runs, by torch.compile(backend='dsc').",
    ),
    (
        errors.TritonMissing("triton"),
        "Kernels for GPUs need triton, which is not installed: pip install triton (Linux only).",
    ),
    (errors.UnknownPass("fus", ("fuse",)), "'fus' is not a pass; did you mean 'fuse'?"),
    (errors.BadPassOrder("a", "needs 'group'", "move it after 'b'"), "Pass 'a' needs 'group'; move it after 'b'."),
    (
        errors.PassFailed("fuse", ValueError("boom."), ("canonicalize", "precision")),
        "Pass 'fuse' failed after canonicalize, precision: ValueError: boom; "
        "leave it out by options={'passes': ...}, and please report it.",
    ),
    (
        errors.PassFailed("fuse", errors.InvalidGraph("after pass 'fuse'", "relu", "it is wrong")),
        "Pass 'fuse' failed: The graph is not legal after pass 'fuse' at node 'relu': it is wrong.",
    ),
    (
        errors.PassFailed("fuse", ValueError("boom."), (), "add_3", "m.py:7, in forward: y = x + 1", "/c/before.txt"),
        "Pass 'fuse' failed: ValueError: boom at node 'add_3', from m.py:7, in forward: y = x + 1; "
        "the graph before it is in /c/before.txt; leave it out by options={'passes': ...}, and please report it.",
    ),
    (
        errors.PassFailed(
            "fuse", errors.InvalidGraph("after pass 'fuse'", "relu", "it is wrong"), (), "relu", "m.py:7"
        ),
        "Pass 'fuse' failed: The graph is not legal after pass 'fuse' at node 'relu': it is wrong, from m.py:7.",
    ),
    (
        errors.BadPlugin("mine", "their-passes", "ImportError: no such file."),
        "Pass 'mine' of the package 'their-passes' cannot be used: ImportError: no such file; "
        "update or remove that package.",
    ),
    (
        errors.UnknownModel("gtp", ("gpt", "vit")),
        "'gtp' is not a model: did you mean 'gpt'? Or give FILE.py:NAME, FILE.pt2, FILE.onnx or hf:CONFIG.json.",
    ),
    (
        errors.BadModel("m.py:Net", "NameError: name 'x' is not defined", "correct the file"),
        "m.py:Net cannot be used: NameError: name 'x' is not defined; correct the file.",
    ),
    (
        errors.BadInput("f3[4]", "'f3' is no dtype"),
        "Input 'f3[4]' cannot be used: 'f3' is no dtype; write --input f32[4,128], i64[4,16]<1000 for indices below "
        "1000, a number, or FILE.py:FUNCTION for a function that gives them all.",
    ),
    (errors.UnknownNode("relu_9", ("relu_8", "mm")), "No graph has a node 'relu_9'; did you mean 'relu_8'?"),
    (errors.InvalidGraph("at the start", "", "it is wrong"), "The graph is not legal at the start: it is wrong."),
    (
        errors.CacheUnusable("/c", "others can write to it"),
        "The cache folder '/c' cannot be used: others can write to it; "
        "name another by options={'cache_dir': ...} or DSC_CACHE_DIR.",
    ),
    (
        errors.CompilerMissing(("g++", "clang++")),
        "No C++ compiler was found (tried g++, clang++); install g++ or clang++, "
        "name one by options={'cxx': ...} or DSC_CXX, or do without by options={'emit': 'aten'}.",
    ),
    (
        errors.InfeasibleBudget(2**30, 3 * 2**29, "the parameters alone need more"),
        "A memory budget of 1.00 GiB cannot be met: the parameters alone need more; "
        "give at least 1610612736 bytes (1.50 GiB) or a smaller batch.",
    ),
    (
        errors.OffloadFailed("addmm, 4.0 MiB", "no space left on device"),
        "Offloading failed for addmm, 4.0 MiB: no space left on device; "
        "free space there, name another folder, or leave offload out.",
    ),
    (
        errors.BadPlan("plan.json", "it is of version 9, and this dsc reads version 1"),
        "The plan in plan.json cannot be used: it is of version 9, and this dsc reads version 1; delete it to plan anew.",
    ),
    (
        errors.CodegenFailed("k0", "g++ says no"),
        "No code could be made for kernel 'k0': g++ says no; "
        "run without generated kernels by options={'emit': 'aten'}, and please report it.",
    ),
    (
        errors.LeftToATen("backward", "g++ says no"),
        "The backward graph runs on ATen, with the same results and no kernels of dsc: g++ says no; "
        "please report it, and silence this by options={'emit': 'aten'}.",
    ),
    (
        errors.LeftToEager("AOTAutograd raised"),
        "One graph runs in eager, with the same results and no kernels of dsc: AOTAutograd raised; "
        "put what causes it into a function under torch.compiler.disable to compile the rest.",
    ),
    (
        errors.LeftToATen(
            "forward", "Pass 'p' failed: E: x; leave it out by options={'passes': ...}, and please report it"
        ),
        "The forward graph runs on ATen, with the same results and no kernels of dsc: Pass 'p' failed: E: x; leave it "
        "out by options={'passes': ...}; please report it, and silence this by options={'emit': 'aten'}.",
    ),
    (
        errors.ModelFailed("m.py:Net", "ValueError: no"),
        "m.py:Net does not run on these inputs: ValueError: no; check the model and --input.",
    ),
    (
        errors.NotReduced("gpt", "no pass changes its results"),
        "Nothing can be cut out of gpt: no pass changes its results; dsc bisect says what is known.",
    ),
    (
        errors.CpuOnly("mkldnn.linear", "linear_1", "cuda"),
        "The model cannot be planned for cuda from here: node 'linear_1' calls mkldnn.linear, which only CPUs have; "
        "trace it on a machine with that device, or write that part in other operators.",
    ),
    (
        errors.BadGraphFile("KeyError: 'nodes'"),
        "The saved graph cannot be read: KeyError: 'nodes'; save it again with this version of dsc and torch.",
    ),
    (
        errors.BadArchive("a.tgz", "it has no manifest"),
        "a.tgz cannot serve as an archive of kernels: it has no manifest; make one by dsc cache --export FILE.",
    ),
    (
        errors.BadCrash("a.json", "it is not JSON"),
        "a.json is not a crash that can be replayed: it is not JSON; give the .json file beside the .txt one.",
    ),
    (
        errors.BadTrace("a.trace", "line 1 is no JSON"),
        "a.trace is not a trace that can be read: line 1 is no JSON; record one by dsc.trace(...) or DSC_TRACE=folder.",
    ),
    (
        errors.TraceUnwritable("/no/a.trace", "No such file or directory"),
        "The trace /no/a.trace cannot be written: No such file or directory; name a file or folder that you can write.",
    ),
    (
        errors.StaleMasks(10),
        "Masks are made anew every 10 steps: on a small language model that cost 0.02 (2 steps) to 0.09 nats (10 steps) "
        "more than doing it at every step, which reads the weights once; leave 'refresh' out.",
    ),
    (
        errors.NothingSparse(("up: its weight is frozen", "a: b", "c: d", "e: f")),
        "No layer of this graph is sparse (up: its weight is frozen; a: b; c: d; ...); choose others by "
        "options={'sparsity': {'layers': ...}}.",
    ),
    (
        errors.NoSparsity(),
        "This state has no masks; compile with options={'sparsity': '2:4', 'state': state}, and run a step before.",
    ),
    (
        errors.StrangeMask("up", "it has no such layer"),
        "The mask of layer 'up' does not fit the model: it has no such layer; give the state that trained it.",
    ),
    (errors.CannotPrune("up", "its outputs are read twice"), "'up' cannot be pruned: its outputs are read twice."),
    (
        errors.BadCluster("8*a100", "it is not of the form CARDSxNAME"),
        "'8*a100' is no cluster: it is not of the form CARDSxNAME.",
    ),
    (
        errors.ClusterTooSmall("2x4xa100", 8, 16, "16 stages"),
        "2x4xa100 has 8 cards, and 16 stages take 16; give a larger cluster or smaller degrees.",
    ),
    (errors.UnknownSchedule("zvb", ("zbv", "1f1b")), "'zvb' is not a schedule; did you mean 'zbv'?"),
    (
        errors.TooManyStages(9, 8, "its graph has 8 calls"),
        "The model cannot be cut into 9 stages (its graph has 8 calls); give at most 8.",
    ),
    (
        errors.BadMicrobatches(3, "they would be unequal on a batch of 8", "give one of 1, 2, 4, 8"),
        "3 micro-batches cannot be: they would be unequal on a batch of 8; give one of 1, 2, 4, 8.",
    ),
    (
        errors.PipelineTooLarge(2**30, 3 * 2**30, 0, "2.00 GiB of parameters", "give more stages"),
        "No pipeline fits into 1.00 GiB a rank: rank 0 needs at least 3.00 GiB (2.00 GiB of parameters); give more stages.",
    ),
    (
        errors.ChartImpossible("plotly is not installed", "pip install it"),
        "The chart cannot be drawn: plotly is not installed; pip install it.",
    ),
    (
        errors.WorldMismatch(3, 4, "4 ranks"),
        "The plan needs 4 processes (4 ranks), and 3 run; launch with torchrun --nproc-per-node 4, or plan for 3 stages.",
    ),
    (
        errors.PlanMismatch("ranks have different plans", "give all the same file"),
        "The pipeline plan does not fit: ranks have different plans; give all the same file.",
    ),
    (
        errors.BadBatch("it has 3 samples", "give 4"),
        "The batch does not fit the pipeline: it has 3 samples; give 4.",
    ),
    (
        errors.RankLost(1, "0F3", "Connection reset"),
        "Rank 1 lost another rank while it ran 0F3 (Connection reset); look for the first error in the logs of the "
        "others, and start again from a checkpoint, or let torchrun do so with --max-restarts.",
    ),
    (errors.StageFailed(1, "0F3", "ValueError: x"), "Rank 1 failed in 0F3: ValueError: x; the other ranks stop too."),
    (
        errors.NotParallel("FSDP with compiled stages", "it hooks modules", "leave one out"),
        "FSDP with compiled stages cannot be: it hooks modules; leave one out.",
    ),
    (
        errors.BadCheckpoint("ckpt", "it is empty"),
        "The checkpoint in ckpt cannot be used: it is empty; give a folder that Pipeline.save wrote.",
    ),
    (
        errors.NotLoaded(),
        "The model was on the meta device and has no values yet; call load or load_state_dict before step.",
    ),
    (
        errors.Untraceable("The loop in f", "its length depends on data", "wrap it in torch.compiler.disable"),
        "The loop in f cannot be traced: its length depends on data; wrap it in torch.compiler.disable.",
    ),
]


@pytest.mark.parametrize(
    ("error", "sentence"), CASES, ids=lambda c: type(c).__name__ if isinstance(c, Exception) else ""
)
def test_message(error: errors.DscError, sentence: str) -> None:
    with pytest.raises(errors.DscError, match=f"^{re.escape(sentence)}$"):
        raise error


@pytest.mark.parametrize("error", [e for e, _ in CASES], ids=lambda e: type(e).__name__)
def test_travels_between_processes(error: errors.DscError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)


def test_keywords_survive_pickling() -> None:
    error = errors.BadOption(name="emit", value="rust", expected="'cpp'")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_every_class_has_a_case() -> None:
    def below(c: type) -> set[type]:
        return {c}.union(*map(below, c.__subclasses__()))

    ours = {c for c in below(errors.DscError) if c.__module__.startswith(errors.__name__)}
    assert ours - {errors.DscError, errors.PrecisionError} == {type(e) for e, _ in CASES}


def test_warning_is_a_user_warning() -> None:
    assert issubclass(errors.DscWarning, UserWarning)
