"""Draw and verify from logits: the law of tokens at the borders of the CDF, the reference, and the Triton kernels."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels import draw
from bebop.kernels.draw import LogitRows
from bebop.kernels.verify import chain_verify, sample
from tests.cases import slow_but
from tests.kernels.test_verify_triton import BELOW_ONE, K, chains_p_value, numbers
from tests.rollout.test_logits import agree, completions, has_the_distribution_of_the_target

draw_triton = pytest.importorskip("bebop.kernels.draw_triton", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on the CPU the kernels run in Triton's interpreter
GPU = pytest.mark.gpu
CLOSE = 4e-6  # of the mass: uniforms so far from a border are on its side, with sums in fp32
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("patched_once")]
Normalise = Callable[..., tuple[LogitRows, Tensor | None]]


def kernels(logits: Tensor, temperature: Tensor | None, u: Tensor | None = None, block: int | None = 4) -> object:
    """Rows and tokens by the kernels."""
    given = [None if x is None else x.to(DEVICE) for x in (logits, temperature, u)]
    return draw_triton.normalise(*given, block=block)


def plain(logits: Tensor, temperature: Tensor | None, u: Tensor | None = None, block: int | None = 4) -> object:
    """The same by the reference."""
    rows = draw.normalise_reference(logits, temperature)
    return rows, None if u is None else sample(rows.probs()[:, 0], u)


FORMS: dict[str, Normalise] = {"kernels": kernels, "reference": plain}  # type: ignore[dict-item]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(logits: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities [B, n, V] in fp64; one-hot at temperature 0."""
    greedy = (temperature == 0)[:, None, None]
    sampled = (logits.double() / torch.where(greedy, 1.0, temperature.double()[:, None, None])).softmax(-1)
    best = torch.zeros_like(sampled).scatter_(-1, logits.float().argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy, best, sampled)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [
        *slow_but(
            [(10, torch.bfloat16), (1, torch.float32)],
            [(v, t) for v in (1, 4, 10, 33) for t in (torch.bfloat16, torch.float16, torch.float32)],
            several=True,
        ),
        pytest.param(151_936, torch.bfloat16, marks=GPU),
        pytest.param(50_257, torch.float32, marks=GPU),
    ],
)
def test_normalisers_entropies_and_log_probs(form: str, vocabulary: int, dtype: torch.dtype) -> None:
    """Against fp64 over the same logits: at temperatures of each row, with tokens that are masked, up to 64 nats."""
    logits = (noise(4, 2, vocabulary) * torch.tensor([1.0, 4.0, 16.0, 16.0])[:, None, None]).clamp(-40, 40).to(dtype)
    logits[1, :, vocabulary // 2 + 1 :] = -torch.inf
    logits[0, 0] = 1.5  # equal ones: the first is the likeliest
    temperature = torch.tensor([1.0, 0.7, 0.0, 2.0])
    p = exact(logits, temperature)
    rows, _ = FORMS[form](logits, temperature, block=None if vocabulary > 100 else 4)
    assert torch.equal(rows.best.cpu(), logits.float().argmax(-1)) and rows.best[0, 0] == 0
    assert (rows.entropy.cpu().double() - torch.special.entr(p).sum(-1)).abs().max() < 1e-4
    assert (rows.probs().cpu().double() - p).abs().max() < 1e-5
    tokens = torch.tensor([[0, vocabulary - 1]] * 4)
    wanted = p.gather(-1, tokens[..., None])[..., 0].log()
    found = rows.logprobs(tokens.to(rows.best.device)).cpu().double()
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5)
    one, _ = FORMS[form](logits, None, block=None if vocabulary > 100 else 4)
    assert (one.probs().cpu().double() - logits.double().softmax(-1)).abs().max() < 1e-5


def borders(p: Tensor) -> tuple[Tensor, Tensor]:
    """Uniforms on both sides of every border of a CDF [V], and both ends; and the tokens that they have to give."""
    ends = p.double().cumsum(0) / p.double().sum()
    inner = ends[:-1][(p[:-1] > 0) & (ends[:-1] < 1 - CLOSE)]
    u = torch.cat([torch.tensor([0.0, BELOW_ONE], dtype=torch.float64), inner - CLOSE, inner + CLOSE])
    wanted = (ends <= u[:, None]).sum(1)
    last = int((p > 0).nonzero().max())
    return u, wanted.clamp_max(last)


# Three tiles of four tokens: one that has no mass, rare tokens beside frequent ones, masked ones at both ends.
HARD = torch.tensor([-torch.inf, 0.0, -7.0, 1.0, *[-torch.inf] * 4, -6.5, 2.0, -torch.inf])


@pytest.mark.parametrize("form", FORMS)
def test_uniforms_at_the_borders_of_the_cdf(form: str) -> None:
    """At a temperature that moves them; a token without mass is never drawn, the last with mass is just below 1."""
    temperature = 1.7
    u, wanted = borders(exact(HARD[None, None], torch.tensor([temperature]))[0, 0])
    assert set(wanted.tolist()) == {1, 2, 3, 8, 9}
    logits, own = HARD.expand(len(u), 1, -1), torch.full((len(u),), temperature)
    rows, tokens = FORMS[form](logits, own, u)
    assert tokens is not None and torch.equal(tokens.cpu(), wanted)
    assert torch.equal(draw.draw_from(rows, u.to(DEVICE) if form == "kernels" else u).cpu(), wanted)
    _, at_one = FORMS[form](logits, None, u)
    assert at_one is not None and not torch.equal(at_one.cpu(), wanted), "the temperature makes no difference"


def test_rare_tokens_keep_their_probability() -> None:
    """Tokens of mass e^-25 behind one of nearly 1, in another tile: to running sums in fp32 they would be lost."""
    logits = torch.full((1, 1, 8), -torch.inf)
    logits[..., 1], logits[..., 5], logits[..., 6] = 0.0, -25.0, -26.0
    p = logits.double().softmax(-1)[0, 0]
    u = torch.stack([p[1] - 1e-14, p[1] + 0.01 * p[5], p[1] + 0.99 * p[5], p[1] + p[5] + 0.01 * p[6]])
    tokens = [form(logits.expand(4, -1, -1), None, u)[1] for form in FORMS.values()]
    assert [token.tolist() for token in tokens if token is not None] == [[1, 5, 5, 6], [1, 1, 1, 1]]


# ---- verification


def chain(
    batch: int, drafts: int, vocabulary: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft logits [B, K, V] and target logits [B, K + 1, V] that resemble each other, and temperatures, some 0."""
    one, two = (torch.Generator(device).manual_seed(seed + k) for k in range(2))
    target = torch.randn(batch, drafts + 1, vocabulary, generator=one, device=device) * 2
    more = torch.randn(batch, drafts, vocabulary, generator=two, device=device)
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.0], device=device).repeat(-(-batch // 4))[:batch]
    return (target[:, :drafts] + 0.5 * more).to(dtype), target.to(dtype), temperature


Drawn = tuple[Tensor, list[LogitRows], LogitRows]


def drawn(form: str, problem: tuple[Tensor, Tensor, Tensor], u: Tensor, block: int | None = 4) -> Drawn:
    """Drafts [B, K] with their distributions, and the target's; ``u`` [B, K]."""
    draft, target, temperature = problem
    made = [FORMS[form](draft[:, j : j + 1], temperature, u[:, j], block) for j in range(draft.shape[1])]
    tokens = torch.stack([token for _, token in made if token is not None], 1)
    return tokens, [rows for rows, _ in made], FORMS[form](target, temperature, None, block)[0]


def verified(form: str, made: Drawn, u: Tensor, lengths: Tensor | None, one_hot: bool, measure: bool = True) -> object:
    """What verification returns, on the CPU."""
    tokens, q, p = made
    device = tokens.device
    where = None if lengths is None else lengths.to(device)
    found = draw.verify(tokens, None if one_hot else q, p, u.to(device), where, measure)
    return [None if x is None else x.cpu() for x in found]


SIZES = [(1, 9), (2, 2), (3, 12), (4, 20)]


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize(("drafts", "vocabulary"), slow_but([(2, 2)], SIZES, several=True))
def test_the_kernels_verify_as_the_reference_does(drafts: int, vocabulary: int, one_hot: bool) -> None:
    """Uniforms at both ends among others, rows that are greedy, and drafts of every length, 0 included."""
    problem, u = chain(6, drafts, vocabulary), numbers(6, 2 * drafts, 2)
    made, wanted = (drawn(form, problem, u[:, :drafts]) for form in FORMS)
    assert torch.equal(made[0].cpu(), wanted[0])
    if one_hot:  # every other row has the drafts that the target likes best
        for tokens, _, target in (made, wanted):
            tokens[::2] = target.best[::2, :drafts]
    lengths = torch.arange(6) % (drafts + 1)
    for given in (None, lengths):
        found = verified("kernels", made, u[:, drafts:], given, one_hot)
        accepted, token, overlap = verified("reference", wanted, u[:, drafts:], given, one_hot)
        assert torch.equal(found[0], accepted) and torch.equal(found[1], token)
        if one_hot:
            assert found[2] is None
            continue
        steps = torch.arange(drafts)
        tested = (steps <= accepted[:, None]) & (steps < (drafts if given is None else given[:, None]))
        assert torch.allclose(found[2][tested], overlap[tested], rtol=0, atol=1e-5) and tested.any()
        assert (found[2][~tested] == 0).all(), "a draft that was not tested was read"
        quick = verified("kernels", made, u[:, drafts:], given, one_hot, measure=False)
        assert torch.equal(quick[0], accepted) and torch.equal(quick[1], token) and quick[2] is None
    assert len(accepted.unique()) > 1


def repeated(rows: LogitRows, count: int) -> LogitRows:
    """The distributions of one request, so many times."""
    tiles = None if rows.tiles is None else rows.tiles.repeat(count, 1, 1, 1)
    logits, best = rows.logits.repeat(count, 1, 1), rows.best.repeat(count, 1)
    return replace(rows, logits=logits, stats=rows.stats.repeat(1, count, 1), best=best, tiles=tiles)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("one_hot", [False, True])
def test_the_law_of_the_token_after_the_drafts(form: str, one_hot: bool) -> None:
    """At the borders of max(0, p - q) after a rejection, and of the row after the drafts where both stand.

    With p, q and residual known, these are all uniforms at which a token changes.
    """
    draft, target, temperature = chain(1, 2, 7, seed=8)
    p, q = exact(target, temperature), exact(draft, temperature)
    token = int((q - p[:, :2])[0, 0].argmax())
    taken = torch.nn.functional.one_hot(torch.tensor(token), 7).double() if one_hot else q[0, 0]
    ratio = float(p[0, 0, token] / taken[token])
    assert ratio < 0.9
    rejected, residual = borders((p[0, 0] - taken).clamp_min(0))
    kept, bonus = borders(p[0, 2])
    count = len(rejected) + len(kept) + 2
    u = torch.zeros(count, 4, dtype=torch.float64)
    u[: len(rejected), 0], u[: len(rejected), 2] = ratio + CLOSE, rejected
    u[len(rejected) : -2, 3] = kept
    u[-2:, 0] = torch.tensor([ratio - CLOSE, ratio + CLOSE])
    tokens, drafts, rows = drawn(form, (draft, target, temperature), torch.zeros(1, 2, dtype=torch.float64))
    tokens = torch.tensor([[token, int(p[0, 1].argmax())]] * count).to(tokens.device)
    made = tokens, [repeated(one, count) for one in drafts], repeated(rows, count)
    accepted, found, _ = verified(form, made, u, None, one_hot)
    wanted = torch.tensor([0] * len(rejected) + [2] * len(kept) + [2, 0])
    assert torch.equal(accepted, wanted)
    assert torch.equal(found[:-2], torch.cat([residual, bonus]))
    assert len(residual.unique()) > 2 and len(bonus.unique()) > 3


@pytest.mark.parametrize("form", FORMS)
def test_what_has_no_mass_never_comes_out(form: str) -> None:
    """Distributions that are equal or nearly so, masses down to e^-80, tokens that are masked, u at both ends."""
    target = torch.full((6, 2, 11), -torch.inf)
    target[:, :, [1, 5, 9]] = torch.tensor([-80.0, 0.0, -60.0])
    draft = target[:, :1].clone()
    draft[2:4, 0, 5] += 1e-6
    draft[4:, 0, 3] = 0.0  # which the target never takes, and which is drafted
    u = torch.tensor([[BELOW_ONE] * 4, [0.0] * 4] * 3, dtype=torch.float64)
    made = drawn(form, (draft, target, torch.ones(6)), u[:, :1])
    made[0][4:] = 3
    for one_hot in (False, True):
        accepted, token, _ = verified(form, made, u[:, 1:], None, one_hot)
        assert (target[torch.arange(6), accepted, token] > -torch.inf).all()
        assert (accepted[4:] == 0).all() and (one_hot or accepted.any())


def from_logits(fault: Callable[[LogitRows, list[LogitRows], Tensor], Tensor] | None = None) -> Callable[..., object]:
    """Chain verification by the reference from logits, in the shape of ``verify.chain_verify``."""

    def verify(tokens: Tensor, q: Tensor, p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        target = draw.normalise(p.log(), None)
        drafts = [draw.normalise(one[:, None].log(), None) for one in q.unbind(1)]
        accepted, token, _ = draw.verify(tokens, drafts, target, u)
        if fault is None:
            return accepted, token
        own = fault(target, drafts, u)[torch.arange(len(u)), accepted]
        return accepted, own.where(accepted < K, token)

    return verify


def residual_is_p(target: LogitRows, drafts: list[LogitRows], u: Tensor) -> Tensor:
    return sample(target.probs(), u[:, K : K + 1].expand(-1, K + 1))


@pytest.mark.slow
def test_the_joint_distribution_from_logits_is_the_targets() -> None:
    assert chains_p_value(from_logits(), 0) > 0.001  # type: ignore[arg-type]
    assert chains_p_value(from_logits(residual_is_p), 0) < 1e-9  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "vocabulary", "dtype"),
    [
        (2, 20, torch.bfloat16),
        *(pytest.param(*case, marks=GPU) for case in [(256, 151_936, torch.bfloat16), (1, 151_936, torch.bfloat16)]),
        *(pytest.param(*case, marks=GPU) for case in [(32, 248_320, torch.float16), (32, 50_257, torch.float32)]),
    ],
)
def test_full_vocabularies_on_the_device(batch: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Tokens of the softmax in fp32; one of 32 may part at a uniform within rounding of a border."""
    draft, target, temperature = chain(batch, 3, vocabulary, dtype=dtype, device=DEVICE)
    u = torch.rand(batch, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    block = None if vocabulary > 100 else 8
    tokens, q, p = drawn("kernels", (draft, target, temperature), u[:, :3], block)
    softmaxes = [draw.normalise_reference(x, temperature).probs() for x in (draft, target)]
    wanted = torch.stack([sample(softmaxes[0][:, j], u[:, j]) for j in range(3)], 1)
    assert (tokens != wanted).sum() <= 3 * batch // 32
    accepted, token, overlap = draw.verify(tokens, q, p, u[:, 3:])
    known = chain_verify(tokens, *softmaxes, u[:, 3:])
    assert (accepted != known[0]).sum() <= batch // 32 and (token != known[1]).sum() <= batch // 32
    first = torch.minimum(softmaxes[0][:, 0], softmaxes[1][:, 0]).sum(-1)
    assert overlap is not None and torch.allclose(overlap[:, 0], first, rtol=0, atol=1e-4)
    spread = torch.special.entr(softmaxes[1]).sum(-1)
    assert torch.allclose(p.entropy, spread, rtol=0, atol=1e-3)


# ---- cycles of an engine, in the interpreter


@pytest.mark.parametrize("system", slow_but(["bebop"], ["autoregressive", "target_only", "bebop", "eagle3"]))
def test_an_engine_decodes_as_from_probabilities(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"max_new_tokens": 4, "temperature": 0.7}
    wanted = completions(system, False, params, count=2)
    monkeypatch.setattr(draw, "compiled", lambda logits: True)
    agree(completions(system, True, params, count=2), wanted)


@pytest.mark.exhaustive("the interpreter takes minutes for so many draws")
def test_completions_have_the_distribution_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "compiled", lambda logits: True)
    has_the_distribution_of_the_target("bebop-0.7")


def test_what_does_not_fit_is_named() -> None:
    problem, u = chain(3, 2, 6), torch.rand(3, 6, dtype=torch.float64)
    tokens, q, p = drawn("kernels", problem, u)
    with pytest.raises(UserError, match=r"uniforms of shape \[3, 6\]; for 2 drafts it is \[3, 4\]"):
        draw_triton.verify(tokens, q, p, u.to(DEVICE))
    with pytest.raises(UserError, match="distributions of 1 drafts for 2 tokens"):
        draw_triton.verify(tokens, q[:1], p, u[:, 2:].to(DEVICE))
    with pytest.raises(UserError, match=r"fp32, bf16 or fp16, not torch\.float64"):
        kernels(problem[0].double(), None)
    assert draw.normalise(problem[0].double(), None).logits.dtype == torch.float32
    none = replace(p, logits=p.logits[:0], stats=p.stats[:, :0], best=p.best[:0], tiles=p.tiles[:0])
    assert [len(x) for x in draw.verify(tokens[:0], None, none, u[:0, 2:].to(DEVICE))[:2]] == [0, 0]
