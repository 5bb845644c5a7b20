"""A teacher on plain torch engines: its scores, contexts, the policy's loss and gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from learner_helpers import (
    SHARED,
    VOCAB,
    PlainEngine,
    make_batch,
    make_groups,
    make_job,
    sharp_policy,
    small_model,
    with_rewards,
)
from tabular import TabularEngine, TabularPolicy

from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.pipeline import build
from rlcore.learner.batch import StepBatch, build_batch, recorded_scores
from rlcore.learner.lm_head import HeadSpec
from rlcore.learner.packing import pack
from rlcore.learner.parts.teacher import Teacher
from rlcore.learner.policy import FrozenPolicy
from rlcore.learner.probes import share_prefixes
from rlcore.learner.update import StepGradient, Update
from rlcore.objectives.distillation import divergence
from rlcore.objectives.specs import TeacherSpec
from rlcore.testing.records import make_group, make_trajectory
from rlcore.types import TEACHER, TEACHER_S, Group

F = torch.float64
ALONE = {"advantage": "reinforce", "loss": "reinforce", "reward_weight": 0.0}
LAY_OUT = partial(pack, micro_batch_tokens=10_000, layout="sorted")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def _spec(**settings: Any) -> TeacherSpec:
    return TeacherSpec(**{"kind": "frozen", "path": "x", "top_k": VOCAB} | settings)


def _other(model: str, noise: float = -0.05) -> FrozenPolicy:
    policy = sharp_policy(model, noise)
    assert share_prefixes(policy.lm) is None
    return FrozenPolicy(policy)


def _update(model: str, spec: TeacherSpec, models: Any = None, **settings: Any) -> Update:
    job = make_job(model, teacher=spec, **{**ALONE, **settings})
    engine = PlainEngine(sharp_policy(model))
    assert share_prefixes(engine.policy.lm) is None
    given = {"": engine} if spec.kind == "policy" else models or {"": _other(model)}
    pipeline = build(job.corrections, job.run_seed, job.objective)
    teacher = Teacher(job, given, engine, ONE_RANK)
    return Update(job, engine, None, pipeline, ONE_RANK, teacher=teacher)


def _step(update: Update, batch: StepBatch) -> StepGradient:
    assert update.teacher is not None
    update.teacher.score(batch, LAY_OUT)
    update.prepare([batch], first=True)
    step = update.run(batch, 0, first=True)
    return replace(step, metrics=step.metrics | update.teacher.metrics(ONE_RANK))


def _gradient(model: str, batch: StepBatch, spec: TeacherSpec, models: Any = None, **settings: Any):
    update = _update(model, spec, models, **settings)
    gradient = _step(update, batch)
    return update.engine.gradients(), gradient  # type: ignore[attr-defined]


def _close(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", ["reverse", "forward", "js"])
def test_the_step_is_that_of_the_written_out_loss(model, kind) -> None:
    """Mean over the sampled tokens of the distance between both heads' whole distributions."""
    batch = make_batch(make_groups(3))
    spec = _spec(divergence=kind, top_k=None, weight=0.5)
    found, step = _gradient(model, batch, spec)
    engine, teacher = PlainEngine(sharp_policy(model)), _other(model)
    (mb,) = batch.micro
    logps = [
        (p.hidden(mb) @ p.head.weight.T / 0.8).log_softmax(-1)
        for p in (engine.policy, teacher.policy)
    ]
    each = divergence(*logps, spec)
    (0.5 * each.mean()).backward()
    _close(found, engine.gradients())
    same = (logps[0].argmax(-1) == logps[1].argmax(-1)).double().mean()
    metrics = step.metrics
    assert metrics["teacher/divergence"] == pytest.approx(float(each.mean()), rel=1e-4)
    assert metrics["teacher/top1_agreement"] == pytest.approx(float(same))
    lengths = batch.sent.mask.sum(1)[mb.episodes][mb.row]
    for q in range(4):
        of = mb.column * 4 // lengths == q
        key = f"teacher/divergence_quarter_{q + 1}"
        assert metrics[key] == pytest.approx(float(each[of].mean()), rel=1e-4)


def test_a_top_k_of_the_whole_vocabulary_is_exact(model) -> None:
    groups = make_groups(3)
    whole, _ = _gradient(model, make_batch(groups), _spec(top_k=None))
    for settings in ({}, {"tail": "drop"}, {"tail": "sampled"}, {"top_k": 3 * VOCAB}):
        found, step = _gradient(model, make_batch(groups), _spec(**settings))
        for name in whole:
            torch.testing.assert_close(found[name], whole[name], atol=2e-5, rtol=1e-3, msg=name)
        assert step.metrics["teacher/tail_mass"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    "settings", [{"top_k": None}, {"top_k": 3}, {"top_k": 2, "tail": "sampled"}]
)
@pytest.mark.parametrize(
    ("tokens", "layout", "costs"),
    [(20, "sorted", None), (60, "packed", None), (30, "sorted", SHARED)],
)
def test_neither_loss_nor_gradient_depends_on_micro_batches(
    model, settings, tokens, layout, costs
) -> None:
    spec, corrections = _spec(**settings), {"tis": {"cap": 2.0}}
    whole, one = _gradient(model, make_batch(make_groups(4)), spec, corrections=corrections)
    batch = make_batch(make_groups(4), tokens, layout, costs)
    assert len(batch.micro) > 1
    parts, other = _gradient(model, batch, spec, corrections=corrections)
    _close(whole, parts)
    for name, value in one.metrics.items():
        if name.startswith("teacher/"):
            assert other.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_rewards_train_nothing_with_a_weight_of_0_and_add_up_otherwise(model) -> None:
    groups = make_groups(3)
    one, _ = _gradient(model, make_batch(groups), _spec())
    other, _ = _gradient(model, make_batch(with_rewards(groups, lambda e: 1e3)), _spec())
    assert all(torch.equal(one[n], other[n]) for n in one)
    both, _ = _gradient(model, make_batch(make_groups(3)), _spec(), reward_weight=0.3)
    plain = Update(
        job := make_job(model, **{**ALONE, "reward_weight": 0.3}),
        PlainEngine(sharp_policy(model)),
        None,
        build(job.corrections, job.run_seed, job.objective),
        ONE_RANK,
    )
    batch = make_batch(make_groups(3))
    plain.prepare([batch], first=True)
    plain.run(batch, 0, first=True)
    rewards = plain.engine.gradients()  # type: ignore[attr-defined]
    _close(both, {n: one[n] + rewards[n] for n in one})


# ----- contexts -----


def _scored(model: str, context: list[int], episode: Any) -> np.ndarray:
    """Log-probs under the policy of an episode's sampled tokens behind some tokens."""
    t = episode.parts[0]
    trajectory = replace(
        t,
        token_ids=np.array([*context, *t.token_ids], np.int32),
        sampled=np.concatenate([np.zeros(len(context), bool), t.sampled]),
    )
    group = make_group([trajectory], [0.0])
    (mb,) = pack(
        build_batch([group], with_topk=False, device=torch.device("cpu")).episodes, 99, "sorted"
    )
    logp = PlainEngine(sharp_policy(model)).forward(mb, None, HeadSpec(0.8, 64)).logp
    return logp.detach().numpy()


def _teacher_scores(model: str, groups: list[Group], spec: TeacherSpec):
    batch = make_batch(groups)
    update = _update(model, spec)
    assert update.teacher is not None
    update.teacher.score(batch, LAY_OUT)
    return batch, batch.teacher, update


def test_a_better_answer_of_the_group_stands_before_an_answer(model) -> None:
    groups = make_groups(2)
    rewards = {(0, 0): 0.0, (0, 1): 1.0, (0, 2): 0.5}
    groups = with_rewards(groups, lambda e: rewards.get((e.score.group_id, e.sample_index), 1.0))
    batch, found, update = _teacher_scores(
        model, groups, _spec(kind="policy", path=None, context="best")
    )
    assert found.on.any(1).tolist() == [True, False, True, False, False, False]
    best = groups[0].episodes[1].parts[0].token_ids.tolist()
    for row in (0, 2):
        expected = _scored(model, best, groups[0].episodes[row])
        np.testing.assert_allclose(found.logp[row][: len(expected)], expected, atol=1e-5)
    assert (found.ids[1] == -1).all() and not torch.equal(found.logp[0], found.logp[2])
    step = _step(update, batch)
    with_one = batch.sent.mask[[0, 2]].sum() / batch.sent.mask.sum()
    assert step.metrics["teacher/token_share"] == pytest.approx(float(with_one))


def test_a_context_that_does_not_fit_leaves_an_episode_without_a_teacher(model) -> None:
    groups = with_rewards(make_groups(1), lambda e: float(e.sample_index == 0))
    room = 1 + max(len(e.parts[0].token_ids) for e in groups[0].episodes)
    update = _update(model, _spec(kind="policy", path=None, context="best"))
    update.engine.policy.lm.config.max_position_embeddings = room  # type: ignore[union-attr]
    batch = make_batch(groups)
    assert update.teacher is not None
    update.teacher.score(batch, LAY_OUT)
    assert batch.teacher is not None and not batch.teacher.on.any()


def test_later_observations_stand_before_an_episode_as_feedback(model) -> None:
    told = make_trajectory(0, 0, turns=[([3, 4], [5, 6]), ([7, 8], [9])])
    plain = make_trajectory(0, 1, turns=[([3, 4], [5, 9])])
    group = make_group([told, plain], [0.0, 1.0])
    _, found, _ = _teacher_scores(
        model, [group], _spec(kind="policy", path=None, context="feedback")
    )
    assert found.on.tolist() == [[True, True, True], [False, False, False]]
    expected = _scored(model, [3, 4, 7, 8], group.episodes[0])
    np.testing.assert_allclose(found.logp[0], expected, atol=1e-5)


def test_every_task_has_the_teacher_of_its_name(model) -> None:
    groups = make_groups(4)
    for g in groups[1::2]:
        g.prompt_id = f"b/train/{g.group_id}"
    groups[2].prompt_id = "c/train/2"
    a, b = _other(model, -0.05), _other(model, 0.2)
    spec = _spec(path=None, paths={"digits": "a", "b": "b"})
    update = _update(model, spec, {"digits": a, "b": b})
    batch = make_batch(groups)
    assert update.teacher is not None
    update.teacher.score(batch, LAY_OUT)
    found = batch.teacher
    assert found is not None
    tasks = np.array(batch.tasks)
    assert not found.on[tasks == "c"].any()
    for task, own in (("digits", a), ("b", b)):
        single = make_batch(groups)
        alone = _update(model, _spec(), {"": own})
        assert alone.teacher is not None
        alone.teacher.score(single, LAY_OUT)
        assert single.teacher is not None
        rows = torch.from_numpy(tasks == task)
        torch.testing.assert_close(found.logp[rows], single.teacher.logp[rows], atol=1e-5, rtol=0)


def test_scores_that_records_carry_are_those_of_the_learner(model) -> None:
    """As an engine of the teacher gives them; a record without them has no teacher."""
    groups = make_groups(2)
    own = make_batch(groups)
    update = _update(model, _spec(top_k=4))
    assert update.teacher is not None
    update.teacher.score(own, LAY_OUT)
    known = own.teacher
    assert known is not None
    episodes = [e for g in groups for e in g.episodes]
    for row, e in enumerate(episodes[1:], 1):
        n = len(e.parts[0].logp_inf)
        given = (known.ids[row, :n].int(), known.logp_at[row, :n], known.logp[row, :n])
        e.parts[0].extras |= {name: x.numpy() for name, x in zip(TEACHER, given)}
        e.parts[0].timings[TEACHER_S] = 0.25
    batch = make_batch(groups)
    found = batch.teacher = recorded_scores(groups, batch.sent.mask, 4)
    assert not found.on[0].any() and (found.ids[0] == -1).all()
    for name in ("on", "logp", "ids", "logp_at"):
        assert torch.equal(getattr(found, name)[1:], getattr(known, name)[1:]), name
    engine = _update(model, _spec(kind="engine", top_k=4), {})
    step = _step(engine, batch)
    assert batch.teacher is found
    share = float(found.on.sum() / batch.sent.mask.sum())
    assert step.metrics["teacher/token_share"] == pytest.approx(share)
    assert step.metrics["teacher/unscored"] == 1
    assert step.metrics["time/teacher_engine_s"] == pytest.approx(0.25 * (len(episodes) - 1))


# ----- the expected gradient, enumerated -----

V, PROMPT, LENGTH = 3, 3, 2


def _table(seed: int) -> torch.Tensor:
    return torch.randn(V + 1, V, generator=torch.Generator().manual_seed(seed), dtype=F)


def _expected(inf: torch.Tensor, new: torch.Tensor, teacher: torch.Tensor, spec: TeacherSpec):
    """The update's expected gradient [V + 1, V] over all sequences of the actor."""
    total = torch.zeros(V + 1, V, dtype=F)
    for a, b in product(range(V), repeat=LENGTH):
        logp = torch.stack([inf[PROMPT].log_softmax(0)[a], inf[a].log_softmax(0)[b]])
        record = make_trajectory(0, 0, turns=[([PROMPT], [a, b])], logp_inf=logp.float().numpy())
        batch = build_batch(
            [make_group([record], [1.0])], with_topk=False, device=torch.device("cpu")
        )
        batch.sent.logp_inf = logp[None]
        batch.micro = pack(batch.episodes, 100, "sorted")
        settings = {"aggregation": "seq-mean-token-sum-norm", "temperature": 1.0}
        job = make_job("", teacher=spec, corrections={"tis": {}}, **ALONE, **settings)
        engine = TabularEngine(new)
        pipeline = build(job.corrections, 0, job.objective)
        frozen = FrozenPolicy(TabularPolicy(teacher))  # type: ignore[arg-type]
        update = Update(
            job,
            engine,
            None,
            pipeline,
            ONE_RANK,
            teacher=Teacher(job, {"": frozen}, engine, ONE_RANK),
        )
        _step(update, batch)
        total += logp.sum().exp() * engine.gradient() * job.sampling.max_new_tokens
    return total


def _exact(inf: torch.Tensor, new: torch.Tensor, teacher: torch.Tensor, spec: TeacherSpec):
    """The gradient of the distances at the states, which are visited as the actor does."""
    z = new.clone().requires_grad_()
    each = divergence(z.log_softmax(-1), teacher.log_softmax(-1), spec)
    visited = torch.cat([inf[PROMPT].softmax(0), torch.ones(1, dtype=F)])
    return torch.autograd.grad((visited * each).sum(), z)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": None},
        {"top_k": None, "divergence": "forward"},
        {"top_k": None, "divergence": "js"},
        {"top_k": 0, "tail": "sampled", "ratio_cap": 1e9},
        {"top_k": 1, "tail": "sampled", "ratio_cap": 1e9},
        {"top_k": 2, "tail": "sampled", "ratio_cap": 1e9},
    ],
    ids=str,
)
def test_the_expected_gradient_is_the_distances_at_the_actors_states(settings) -> None:
    """With an actor that is neither the policy nor the teacher."""
    inf, new, teacher = _table(0), _table(1), _table(2)
    spec = _spec(**settings)
    found = _expected(inf, new, teacher, spec)
    torch.testing.assert_close(found, _exact(inf, new, teacher, spec), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 1}, {"top_k": 1, "tail": "drop"}, {"top_k": 0, "tail": "sampled", "ratio_cap": 1.0}],
    ids=str,
)
def test_what_is_said_to_be_biased_is(settings) -> None:
    inf, new, teacher = _table(0), _table(1), _table(2)
    spec = _spec(**settings)
    found = _expected(inf, new, teacher, spec)
    assert float((found - _exact(inf, new, teacher, spec)).abs().max()) > 0.02
