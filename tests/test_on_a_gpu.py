"""A job's parts on a GPU are those on a CPU: tokens and log-probs, one update, weights on their way.

Each test runs on the CPU as well, against itself or against another precision, so that its body is sound before it
meets a card. All tests marked gpu (``make test-gpu``) should end in 45 s on an H100; none of it has been timed there:

- imports, collection and CUDA: 11 s, seven of which were measured here;
- compiling some 60 kernels of ``tests/kernels`` and of the engine, each once: 15 s, at .25 s each as here for sm_90;
- running them at V = 151,936: 1 s, as a loss of 256 rows and its fp64 reference move some 12 GB, 4 ms at 3 TB/s;
- the engine here: 8 s for 355,000 operations at 20 us and 139,000 views at 4 us, and 3 s for the same on the CPU;
- CUDA graphs: 14 s, for 200,000 operations and 50 captures, each of which collects Python's garbage first;
- updates, attention and weights: 2 s, for 2,000 operations each.
"""

import pickle
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from bebop.bench import precision
from bebop.certify.precision import SAMPLER
from bebop.driver.weights import SharedReader, WeightBuffers, verify_weights, with_manifest
from bebop.metrics.metrics import values
from bebop.model.attention import PackedContext
from bebop.model.backbone import Policy
from bebop.rollout.decoding.graphs import CudaRecorder, EagerRecorder
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.trainer.policy import PolicyTrainer
from bebop.trajectory import Completion
from tests.builders import requests, tiny_policy
from tests.rollout.test_conformance import PROMPTS, QUICK, engine
from tests.trainer.builders import batch, job, plain, plain_logprobs, policy, weights_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def moved(source: Policy, device: str) -> Policy:
    """The policy with all of its parts on a device, in place."""
    draft = [] if source.draft is None else source.draft.modules()
    for module in (*source.modules(), *source.parts.values(), *draft):
        module.to(device)
    return source


def on_a_gpu(cases: Iterable[tuple[str, torch.dtype]]) -> list[object]:
    return [pytest.param(system, dtype, "cuda", marks=pytest.mark.gpu) for system, dtype in cases]


# In fp64 the references decode on a GPU too, in fp32 the kernels.
CASES = [("bebop", torch.float32, "cpu"), *on_a_gpu((name, torch.float32) for name in SYSTEMS)]
CASES += on_a_gpu((name, torch.float64) for name in QUICK)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("system", ["bebop", "bebop_tree"])
def test_pages_give_what_slots_give(system: str, device: str) -> None:
    """In a pool that is too small for all of them, so that requests are preempted and read again."""
    asked = requests(PROMPTS, max_new_tokens=24)
    found = []
    for settings in ({"paged": False}, {"paged": True, "cache_tokens": 96}):
        policy = moved(tiny_policy(seed=9, dtype=torch.float64), device)
        found.append(generate(engine(policy, system, **settings), asked))
    agrees(found[1], found[0], but=0)


@pytest.mark.parametrize(("system", "dtype", "device"), CASES)
def test_tokens_and_log_probs_are_those_of_a_cpu(system: str, dtype: torch.dtype, device: str) -> None:
    """In fp32 one answer of five may part at a uniform within rounding of a border; up to there it is the same."""
    asked = requests(PROMPTS, max_new_tokens=24)
    wanted = generate(engine(tiny_policy(seed=9, dtype=dtype), system), asked)
    found = generate(engine(moved(tiny_policy(seed=9, dtype=dtype), device), system), asked)
    agrees(found, wanted, but=int(dtype == torch.float32))


def agrees(found: Sequence[Completion], wanted: Sequence[Completion], but: int) -> None:
    """Completions are the same, all ``but`` so many; up to where one parts its log-probs are."""
    same = [a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(found, wanted, strict=True)]
    assert sum(same) >= len(same) - but, same
    for a, b, equal in zip(found, wanted, same, strict=True):
        alike = len(a.token_ids) if equal else int((a.token_ids != b.token_ids[: len(a.token_ids)]).argmax())
        np.testing.assert_allclose(a.logprobs[:alike], b.logprobs[:alike], rtol=0, atol=1e-4)


@pytest.mark.parametrize("system", ["bebop", "bebop_tree", "block"])
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_over_pages_give_the_tokens_of_slots(device: str, system: str) -> None:
    """By kernels that share nothing: of slots PyTorch's attention with a mask, of pages our own, on a GPU."""
    own, asked = moved(tiny_policy(seed=9), device), requests(PROMPTS, max_new_tokens=12)
    slots, pages = (generate(engine(own, system, paged=paged), asked) for paged in (False, True))
    agrees(pages, slots, but=1)


CAPTURED = [name for name, system in SYSTEMS.items() if system.static and system.draft_temperature is None]
HALF = [name for name, system in SYSTEMS.items() if system.static_verify]


@pytest.mark.parametrize(
    ("system", "dtype", "device"),
    [("bebop", torch.float64, "cpu"), *on_a_gpu((name, torch.float32) for name in (*CAPTURED, *HALF))],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_captured_cycles_give_the_tokens_of_eager_ones(
    system: str, dtype: torch.dtype, device: str, overlap: bool
) -> None:
    """In batches of four, two and one. On the CPU a recorder runs the padded bodies.

    With overlap a cycle is launched before the one before is read; systems of which half is captured are read at once.
    """
    if overlap and system in HALF:
        pytest.skip("it is read at once")
    own, asked = moved(tiny_policy(seed=9, dtype=dtype), device), requests(PROMPTS, max_new_tokens=24)
    wanted = generate(engine(own, system), asked)
    recorder = CudaRecorder() if device == "cuda" else EagerRecorder()
    found = generate(engine(own, system, recorder=recorder, overlap=overlap), asked)
    agrees(found, wanted, but=int(dtype == torch.float32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", precision.TYPES)
def test_log_probs_of_coarse_types_lie_within_their_bounds(dtype: str, device: str) -> None:
    """Against transformers in fp32 with TF32 off; of their own logits, too."""
    policy = precision.random_policy(precision.random_shape(2, 64), device)
    row, found = precision.deviations_of(policy, dtype, 16, 32)
    assert found.beyond() == [] and row["sampler"] < SAMPLER, row
    assert 0.7 < row["rms ratio"] < 1.4, "the bound is no wider than it has to be"


def updated(device: str, dtype: str, rank: int = 0) -> tuple[PolicyTrainer, dict[str, float], Tensor]:
    """A trainer after one update, its metrics, and how all that is trained changed, on the CPU.

    ``rank``: of an adapter, beside a model that stays in its type.
    """
    source = moved(policy(dtype=getattr(torch, dtype) if rank else torch.float32), device)
    trainer = PolicyTrainer(source, job(model={"device": device, "dtype": dtype}, trainer={"lora": {"rank": rank}}))
    trained = trainer.optimizer.named
    before = {name: p.detach().clone() for name, p in trained.items()}
    metrics = values(trainer.update(batch()))
    return trainer, metrics, torch.cat([(p.detach() - before[name]).flatten().cpu() for name, p in trained.items()])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(
    ("dtype", "bound", "alike"),  # of loss, norm of the gradient and entropy; cosine of the change of weights
    [("float32", 1e-4, 0.999), ("bfloat16", 0.02, 0.95)],  # measured on a CPU in bf16: 0.009 and 0.986
)
def test_an_update_is_that_of_a_cpu_in_fp32(device: str, rank: int, dtype: str, bound: float, alike: float) -> None:
    """AdamW's first step takes the sign of a gradient, which rounding turns where it is small: hence a cosine."""
    if rank:
        pytest.importorskip("peft")  # the machines with a GPU may lack it
    _, metrics, change = updated(device, dtype, rank)
    _, wanted, exact = updated("cpu", "float32", rank)
    for name in ("train/loss", "train/grad_norm", "policy/entropy"):
        assert metrics[name] == pytest.approx(wanted[name], rel=bound, abs=bound), name
    assert metrics["train/ratio_error_max"] < (0.2 if dtype == "bfloat16" else 1e-3)
    assert cosine_similarity(change, exact, dim=0) > alike
    assert float(change.norm()) == pytest.approx(float(exact.norm()), rel=0.02)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_goes_on_from_its_state(device: str, checkpointing: bool) -> None:
    """Weights, moments and step counts arrive where the optimizer of the device wants them: fused ones on a GPU."""
    config = job(model={"device": device}, trainer={"checkpointing": checkpointing})
    first, again = (PolicyTrainer(moved(policy(), device), config) for _ in range(2))
    first.update(batch())
    again.load_state_dict(first.state_dict())
    for trainer in (first, again):
        trainer.update(batch(seed=1))
    assert bool(first.optimizer.defaults["fused"]) == (device == "cuda")
    for name, tensor in first.weights().items():
        torch.testing.assert_close(again.weights()[name], tensor, rtol=0, atol=0 if device == "cpu" else 1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_rows_attend_as_on_a_cpu_in_fp32(device: str) -> None:
    """In bfloat16 a GPU leaves padding out; values and gradients, with two query heads for one of keys."""
    lengths, generator = torch.tensor([37, 1, 130]), torch.Generator().manual_seed(0)
    given = [torch.randn(1, heads, 168, 64, generator=generator).bfloat16() for heads in (4, 2, 2, 4)]

    def attended(device: str, dtype: torch.dtype) -> list[Tensor]:
        *inputs, upstream = (x.to(device, dtype, copy=True).requires_grad_() for x in given)
        out = PackedContext(lengths.to(device)).attend(0, *inputs, 0.125)
        out.backward(upstream.detach().transpose(1, 2))
        return [x.detach().float().cpu() for x in (out, *(x.grad for x in inputs)) if x is not None]

    for ours, wanted in zip(attended(device, torch.bfloat16), attended("cpu", torch.float32), strict=True):
        assert float((ours - wanted).norm()) < 0.01 * float(wanted.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["store", "shared"])
def test_published_weights_arrive_in_an_engine_to_the_bit(device: str, dtype: str, way: str) -> None:
    """Trainer, manifest, pickle or shared memory, check, engine; what it decodes then has the log-probs of the new
    weights."""
    trainer, _, _ = updated(device, dtype)
    if way == "shared":
        buffers, reader = WeightBuffers(), SharedReader(pinned=device == "cuda")
        sent, _ = reader.open(buffers.write(trainer.full_weights(mtp=True), trainer.layout(mtp=True)))
        assert device == "cpu" or all(tensor.is_pinned() for tensor in sent.values())
    else:
        sent = verify_weights(pickle.loads(pickle.dumps(with_manifest(trainer.weights(mtp=True)))))
    own = moved(policy(dtype=getattr(torch, dtype)), device)
    decoding = engine(own, slots=2)
    assert isinstance(decoding, TorchEngine)
    decoding.load_weights(decoding.stage(sent), trainer.version)
    arrived = weights_of(own)
    assert arrived.keys() == sent.keys()
    assert all(x.device.type == device and torch.equal(x.cpu(), sent[name]) for name, x in arrived.items())
    asked = requests(PROMPTS[2:4], max_new_tokens=8, temperature=0.8)
    answers = generate(decoding, asked)
    reference = policy()
    reference.load({name: x.float() for name, x in sent.items()})
    for request, answer in zip(asked, answers, strict=True):
        assert (answer.versions == 1).all()
        exact = plain_logprobs(plain(reference), request.token_ids, answer.token_ids.tolist()).detach()
        np.testing.assert_allclose(answer.logprobs, exact, rtol=0, atol=1e-4 if dtype == "float32" else 0.1)
