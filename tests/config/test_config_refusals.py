"""What is refused, and that the sentence names the key, the value and the choices."""

import pytest

from rlcore.config.compose import load
from rlcore.errors import UserError

DISTILL = "learner.distill={}"
LAYERS = ["learner.ranks=2", "learner.tensor_parallel=2"]
KL_IN_REWARD = ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"]
PARTS = ["learner.ranks=2", "learner.sequence_parallel=2"]
EXPERTS = ["learner.ranks=4", "learner.expert_parallel=2"]
ADAPTER = "learner.lora={publish: adapter}"
FP8_ON_GPU = "+actor.q={kind: fp8, num_gpus: 1}"
GPUS = ["learner.num_gpus=1", "learner.zero_stage=1", "actor.bf16.num_gpus=1"]
BLOCKS = "actor.sparse.sparse={{blocks:4,prompt:block,prompt_block:{}}}"
LENGTHS = "actor.sparse.sparse={{blocks:null,blocks_by_length:{}}}"
BY_LENGTH = ["actor=sparse", "actor.sparse.sparse={blocks:null,blocks_by_length:[4]}"]
SPECULATING = "actor.bf16.speculate={path: x}"
ROUNDED = "+actor.q={kind: fp8, rounding: int3}"
SHARES = [*GPUS, "learner.num_gpus=0.5", "actor.bf16.num_gpus=0.5", "cluster.transport=ipc"]
ONE_GPU = ["learner=gpu", "learner.num_gpus=0.25", "learner.draft={}", "actor=draft"]
ONE_GPU += ["actor.draft={draft_path: x, num_gpus: 0.25, gpu_memory_utilization: 0.3}"]
BITWISE = ("bitwise=true", "schedule=on_policy")
ROUND_AS = (ROUNDED, "learner.round_as=q")
ROUNDED_TO = "+actor.q={{kind: fp8, rounding: int3, target: {{{}}}}}"
REFUSED = [  # words; parts that the sentence must hold
    (["modle=tiny"], ["modle=tiny", "perhaps model is meant"]),
    (["model=tinny"], ["model=tinny", "perhaps tiny is meant", "path, small, smollm2, tiny"]),
    (["experiment=nope"], ["experiment=nope", "quickstart"]),
    (["model=[tiny,small]"], ["model=[tiny,small]", "only actor, correction and task take a list"]),
    (["correction=dvp,mis"], ["correction=[dvp,mis]"]),
    (["actor={a:1}"], ["actor={a:1}", "bf16, draft, fp8, sparse"]),
    (["~model"], ["~model", "path, small, smollm2, tiny"]),
    (["~learner.lrr"], ["~learner.lrr"]),
    (["learner.zero_stge=2"], ["learner.zero_stge=2", "perhaps learner.zero_stage is meant"]),
    (["algorithm.lr=1"], ["algorithm.lr=1", "perhaps learner.lr is meant"]),
    (["actor.bf16.knd=fp8"], ["actor.bf16.knd=fp8", "perhaps actor.bf16.kind is meant"]),
    (["correction.tis.caps=3"], ["correction.tis.caps=3", "perhaps correction.tis.cap is meant"]),
    (["learner.zero_stage=4"], ["learner.zero_stage=4", "0, 1, 2, 3"]),
    (["actor.bf16.kind=fp9"], ["actor.bf16.kind=fp9", "bf16, fp8, sparse, draft"]),
    (["learner.lr=fast"], ["learner.lr=fast", "number"]),
    (["learner.lr=-1"], ["learner.lr=-1", "greater than 0"]),
    (["learner.lr=inf"], ["learner.lr=", "finite"]),
    (["schedule.steps=true"], ["schedule.steps=true", "integer"]),
    (["schedule.steps=2.5"], ["schedule.steps=2.5", "integer"]),
    (["rollout.stop=x"], ["rollout.stop=x", "array"]),
    (["seed.x=1"], ["seed"]),
    (["evaluation=3"], ["evaluation=3"]),
    (["word"], ["word", "key=value"]),
    (["hydra.run.dir=x"], ["hydra.run.dir=x"]),
    (["model.system_prompt=${oc.env:RLCORE_NO_SUCH}"], ["RLCORE_NO_SUCH"]),
    (["model.path=null", "model.fresh=null"], ["model.path", "model.fresh"]),
    (["model.fresh.heads=3"], ["model.fresh.heads=3", "kv_heads=2"]),
    (["model.fresh.head_dim=16"], ["model.fresh.head_dim=16", "actor.bf16", "32, 64, 80"]),
    (
        ["experiment=draft_frozen", "actor.draft.draft_fresh.head_dim=48"],
        ["actor.draft.draft_fresh.head_dim=48", "32, 64, 80"],
    ),
    (["rollout.max_new_tokens=128"], ["rollout.max_new_tokens=128", "model.max_len=128"]),
    (["evaluation.actors=[nope]"], ["evaluation.actors=['nope']", "choose among bf16"]),
    (["evaluation.report_k=[4]"], ["evaluation.report_k=[4]", "evaluation.samples=1"]),
    (["evaluation.max_new_tokens=128"], ["evaluation.max_new_tokens=128", "model.max_len=128"]),
    (["rollout.top_p=0.9", "rollout.logprobs_k=0"], ["rollout.top_p=0.9", "logprobs_k=0"]),
    (["rollout.top_k=30"], ["rollout.top_k=30", "raise rollout.logprobs_k=20 to rollout.top_k"]),
    (["rollout.top_k=5", "actor=sparse", DISTILL], ["rollout.top_k=5", "learner.distill"]),
    (["rollout.top_k=5", "correction=dvp"], ["rollout.top_k=5", "kept mass"]),
    (["rollout.min_p=0.1", "correction=dvp"], ["rollout.min_p=0.1", "correction.dvp.rho"]),
    (["correction=[none,tis]"], ["correction=[none,tis]", "none stands alone"]),
    (["correction=none", "correction.none={cap:1}"], ["correction.none", "empty"]),
    (["correction.mine={cap:1}"], ["correction.mine=", "keys of correction: tis, mis"]),
    (["correction.tiss={cap:1}"], ["correction.tiss=", "perhaps correction.tis is meant"]),
    (["correction.tis=3"], ["correction.tis=3", "an object"]),
    (["correction.mine={name:nope}"], ["correction.mine.name=nope", "tis", "file.py"]),
    (
        ["correction.mine={name:'json:loads'}"],
        ["correction.mine.name=json:loads", "CorrectionSpec"],
    ),
    (["correction.also={name:tis,caps:3}"], ["correction.also.caps=3"]),
    (["correction=[tis,veto,mis]"], ["correction=[tis,veto,mis]", "tis and mis", "same ratio"]),
    (["correction=[jackpot,ais]"], ["jackpot and ais"]),
    (
        ["correction=mis", "correction.mis.low=3"],
        ["correction.mis.low=3", "less than or equal to 1"],
    ),
    (["correction.tis.cap=0.5"], ["correction.tis.cap=0.5", "greater than or equal to 1"]),
    (["correction=jackpot", "correction.jackpot.short_circuit=true"], ["target=ref", "target=new"]),
    (
        ["correction=rapid", "algorithm=rapid", "algorithm.train_on_best=4"],
        ["algorithm.train_on_best=4", "correction=rapid"],
    ),
    (["correction=dppo"], ["algorithm.loss=ppo", "correction=dppo", "algorithm=dppo"]),
    (["correction=[dppo,tis]", "algorithm=dppo"], ["correction=[dppo,tis]", "dppo and tis"]),
    (["correction=opsm"], ["correction.opsm.delta is required"]),
    (["correction=opsm", "correction.opsm.delta=-1"], ["correction.opsm.delta=-1"]),
    (["correction.mis.low=1"], ["correction.mis.low=1", "correction=[tis]"]),
    (["actor.fp8.count=2"], ["actor.fp8.count=2", "actor=[bf16]"]),
    (["correction=jackpot", "rollout.logprobs_k=0"], ["rollout.logprobs_k=0", "jackpot"]),
    (["rollout.logprobs_k=-1"], ["rollout.logprobs_k=-1"]),
    (
        ["correction.tis.adjusted=true", "algorithm=gspo"],
        ["correction.tis.adjusted", "algorithm.loss=gspo"],
    ),
    (["correction=rapid"], ["algorithm.loss=ppo", "rapid"]),
    (["learner.betas=[0.9,1.0]"], ["learner.betas=[0.9, 1.0]", "below 1"]),
    (["rollout.stop=['']"], ["rollout.stop", "empty string"]),
    (["learner=lora", "learner.lora.targets=[]"], ["learner.lora.targets=[]", "at least 1 item"]),
    (["algorithm.loss=json:loads"], ["algorithm.loss=json:loads", "is not a class", "PolicyLoss"]),
    (
        ["algorithm.advantage=json:JSONDecoder"],
        ["algorithm.advantage=json:JSONDecoder", "lacks", "Advantage"],
    ),
    (
        ["correction=[tis]", "algorithm.ratio_to=p_inf"],
        ["algorithm.ratio_to=p_inf", "correction=tis", "ratio_to=p_ref"],
    ),
    (
        ["correction=[kl_cov]", "algorithm.ratio_to=p_inf"],
        ["algorithm.ratio_to=p_inf", "correction=kl_cov", "ratio_to=p_ref"],
    ),
    (
        ["algorithm=passk", "algorithm.pass_k=9", "rollout.samples_per_prompt=8"],
        ["algorithm.pass_k=9", "rollout.samples_per_prompt=8", "at most 8"],
    ),
    (
        ["algorithm=sapo", "algorithm.sapo_tau_neg=0"],
        ["algorithm.sapo_tau_neg=0", "greater than 0"],
    ),
    (
        ["correction=[clip_cov]", "correction.clip_cov.low=6"],
        ["correction.clip_cov.low=6", "correction.clip_cov.high=5"],
    ),
    (
        ["algorithm=rloo", "correction=none", "algorithm.ratio_to=p_inf"],
        ["algorithm.ratio_to=p_inf", "algorithm.loss=reinforce", "algorithm.loss=ppo"],
    ),
    (
        [*KL_IN_REWARD, "algorithm.turn_share=0.5", "algorithm.credit=token"],
        ["algorithm.kl_in=reward", "algorithm.turn_share=0.5", "kl_in=loss"],
    ),
    (
        [*KL_IN_REWARD, "algorithm=rapid", "correction=rapid"],
        ["algorithm.kl_in=reward", "correction=rapid", "kl_in=loss"],
    ),
    (["algorithm.dual_clip=1"], ["algorithm.dual_clip=1", "greater than 1"]),
    (
        ["algorithm=gspo", "algorithm.dual_clip=3"],
        ["algorithm.dual_clip=3", "algorithm.loss=gspo", "algorithm.loss=ppo"],
    ),
    (
        ["algorithm.whitening=tokens"],
        ["algorithm.whitening=tokens", "algorithm.advantage=grpo", "advantage=reinforce_pp"],
    ),
    (
        ["algorithm=reinforce_pp_baseline", "rollout.samples_per_prompt=1"],
        ["rollout.samples_per_prompt=1", "algorithm.advantage=reinforce_pp_baseline"],
    ),
    (
        ["algorithm.dual_clip=3", "correction.tis.adjusted=true"],
        ["algorithm.dual_clip=3", "correction.tis.adjusted=true"],
    ),
    (["correction=rapid", "algorithm.loss=reinforce"], ["algorithm.advantage=grpo", "rapid"]),
    (["checkpoint.keep_best=reward/mean"], ["checkpoint.keep_best=reward/mean", "eval/digits/"]),
    (["algorithm.train_on_best=8"], ["algorithm.train_on_best=8", "rollout.samples_per_prompt=8"]),
    (
        ["algorithm.train_on_best_by=acceptance"],
        ["train_on_best_by=acceptance", "algorithm.train_on_best"],
    ),
    (
        ["algorithm=dapo", "algorithm.train_on_best=4", "algorithm.train_on_best_by=acceptance"],
        ["algorithm.dynamic_sampling=true", "algorithm.train_on_best_by=acceptance"],
    ),
    (["algorithm.train_on_best=1"], ["algorithm.train_on_best=1", "algorithm.advantage=grpo"]),
    (
        ["rollout.samples_per_prompt=1"],
        ["rollout.samples_per_prompt=1", "algorithm.advantage=grpo"],
    ),
    (["algorithm.overlong_share=1"], ["algorithm.overlong_share=1", "less than 1"]),
    (["schedule.max_staleness=0"], ["on_publish=in_flight", "max_staleness=0"]),
    (["schedule.sampling=by_task"], ["schedule.sampling=by_task", "fifo, uniform"]),
    (["schedule.sampling=lifo"], ["schedule.sampling=lifo", "fifo, uniform"]),
    (["algorithm.loss=ppoo"], ["algorithm.loss=ppoo", "perhaps ppo is meant", "gspo", "file.py"]),
    (["algorithm.advantage=gea"], ["algorithm.advantage=gea", "grpo", "rloo", "file.py"]),
    (["learner.engine=megatron"], ["learner.engine=megatron", "deepspeed", "file.py"]),
    (["actor.bf16.engine=sglang"], ["actor.bf16.engine=sglang", "vllm", "file.py"]),
    (["algorithm.loss=none.py:Mine"], ["algorithm.loss=", "none.py:Mine", "cannot be loaded"]),
    (
        ["evaluation.tasks={more: {name: digits, grade_timeout_s: 3}}"],
        ["evaluation.tasks.more.grade_timeout_s=3"],
    ),
    (["schedule.max_uses=2"], ["schedule.max_uses=2", "uniform"]),
    *(
        (["schedule=fixed_lag", f"schedule.{word}"], [f"schedule.{word}", "schedule.lag=8", use])
        for word, use in (
            ("max_staleness=4", "use max_staleness=8"),
            ("steps_per_publish=2", "use steps_per_publish=1"),
            ("steps_per_phase=4", "use steps_per_phase=1"),
            ("epochs=2", "use epochs=1"),
            ("sampling=uniform", "use sampling=fifo"),
            ("sampling=by_task", "use sampling=fifo"),
        )
    ),
    (["schedule=fixed_lag", "schedule.lag=0"], ["schedule.lag=0", "greater than 0"]),
    (
        ["schedule=fixed_lag", "actor.bf16.target={value:0.9}"],
        ["actor.bf16.target", "schedule.lag=8"],
    ),
    (["schedule=fixed_lag", "schedule.colocated=true"], ["colocated=true", "max_staleness=8"]),
    (
        ["schedule.sampling=uniform", "schedule.max_uses=2", "schedule.epochs=3"],
        ["schedule.epochs=3", "schedule.max_uses=2", "at 1"],
    ),
    (
        [
            *("actor=draft", "actor.draft.draft_path=f", "learner.draft={}"),
            *("schedule=large_batch", "schedule.steps_per_phase=2"),
        ],
        ["schedule.steps_per_publish=8", "phases of 2 steps", "learner.draft"],
    ),
    (["schedule.epochs=0"], ["schedule.epochs=0", "greater than 0"]),
    (
        ["schedule.steps_per_publish=3", "schedule.steps_per_phase=2", "schedule.epochs=2"],
        ["steps_per_publish=3", "a phase of 4 steps", "steps_per_phase=2 x schedule.epochs=2"],
    ),
    (
        ["algorithm=rloo", "correction=veto", "schedule.epochs=2"],
        ["schedule.epochs=2", "algorithm.loss=reinforce", "correction=[veto]", "tis"],
    ),
    (["actor.bf16.kind=sparse"], ["actor.bf16.kind=sparse", "actor.bf16.sparse"]),
    (["actor.bf16.sparse={blocks:4}"], ["actor.bf16.kind=bf16", "actor.bf16.sparse"]),
    (["actor=sparse", "actor.sparse.sparse.share=0.5"], ["blocks=4", "share=0.5"]),
    (["actor=sparse", LENGTHS.format("[4,3]")], ["blocks_by_length=[4,3]", "must not fall"]),
    (["actor=sparse", LENGTHS.format("[4],length_step:40")], ["length_step=40", "block_size=16"]),
    (["actor=sparse", BLOCKS.format(40)], ["prompt_block=40", "multiple", "block_size=16"]),
    (["actor=sparse", BLOCKS.format(8192)], ["prompt_block=8192", "4096"]),
    (["actor=sparse", "actor.sparse.sparse.prompt=blocks"], ["prompt=blocks", "sparse, block"]),
    (["actor=sparse", "actor.sparse.target={moves:pages}"], ["blocks_by_length", "not set"]),
    (
        [*BY_LENGTH, "actor.sparse.target={moves:pages}", "learner.train_sparse=true"],
        ["moves=pages", "learner.train_sparse=true"],
    ),
    (
        [*BY_LENGTH, "actor.sparse.target={moves:pages,least:1}"],
        ["actor.sparse.target.least=1", "at least 2"],
    ),
    (
        [ROUNDED, "actor.bf16.target={moves:share}"],
        ["actor.bf16.target.moves=share", "actor.bf16.share"],
    ),
    (
        [
            ROUNDED,
            "actor.bf16.target={moves:share,least:1}",
            "actor.bf16.share=0.5",
        ],
        ["actor.bf16.target.least=1", "below 1"],
    ),
    (
        ["actor.bf16.target={moves:layers,most:2}"],
        ["actor.bf16.target.moves=layers", "actor.bf16.rounding=none"],
    ),
    (
        [ROUNDED_TO.format("moves: layers")],
        ["actor.q.target.moves=layers", "actor.q.target.most"],
    ),
    (
        [ROUNDED_TO.format("moves: layers, most: 2"), "cluster.transport=gloo"],
        ["actor.q.target.moves=layers", "cluster.transport=gloo"],
    ),
    (
        [ROUNDED_TO.format("most: 2"), "schedule.max_staleness=4"],
        ["actor.q.target.most=2", "moves=layers"],
    ),
    (
        ["actor.bf16.target={least:5}", "schedule.max_staleness=4"],
        ["actor.bf16.target.least=5", "schedule.max_staleness=4"],
    ),
    (["actor.bf16.kind=draft"], ["actor.bf16.draft_path"]),
    (["actor.bf16.draft_path=x"], ["actor.bf16.draft_path=x", "kind=bf16"]),
    (["actor=fp8", "actor.fp8.rounding=none"], ["actor.fp8.kind=fp8", "int8"]),
    (["actor=fp8", "actor.fp8.num_gpus=1"], ["actor.fp8.rounding=fp8", "rounding=none"]),
    (["actor=fp8", "actor.fp8.fp8_kv_cache=true"], ["actor.fp8.fp8_kv_cache"]),
    (
        ["actor=sparse", "actor.sparse.num_gpus=1", "actor.sparse.fp8_kv_cache=true"],
        ["fp8_kv_cache", "kind=sparse"],
    ),
    (
        ["actor=sparse", "actor.sparse.rounding=int4"],
        ["actor.sparse.rounding=int4", "actor.sparse.kind=sparse"],
    ),
    (["learner.fused_head=true"], ["learner.fused_head=true", "num_gpus=0"]),
    (
        ["learner=gpu", "learner.fused_head=true", "learner.fp32_head=false"],
        ["learner.fused_head=true", "fp32_head=false"],
    ),
    (["+actor.q={activations: int8, num_gpus: 1}"], ["actor.q.activations=int8", "kind=fp8"]),
    (["actor=sparse", "actor.sparse.activations=fp8"], ["sparse.activations=fp8", "kind=sparse"]),
    (
        ["actor.bf16.activations=nvfp4", "actor.bf16.enforce_eager=false"],
        ["actor.bf16.activations=nvfp4", "leave it null"],
    ),
    (
        ["actor=fp8", "actor.fp8.activations=int8", "learner.round_as=fp8"],
        ["learner.round_as=fp8", "actor.fp8.activations=int8 rounds what", "round_as=null"],
    ),
    (
        ["+actor.q={rounding: int8, activations: int8, target: {moves: layers}}"],
        ["actor.q.target.moves=layers", "use activations=none"],
    ),
    (["actor.bf16.activations=mxfp4", *BITWISE], ["bitwise=true", "bf16.activations=mxfp4"]),
    ([ADAPTER, "actor.bf16.activations=int8"], ["publish=adapter", "int8", "activations=none"]),
    (
        ["experiment=draft_frozen", "actor.draft.rounding=fp8"],
        ["actor.draft.rounding=fp8", "actor.draft.kind=draft"],
    ),
    *(
        ([SPECULATING, *words], ["actor.bf16.speculate", *said])
        for words, said in (
            (["actor.bf16.tensor_parallel=2"], ["tensor_parallel=2"]),
            (["actor.bf16.engine=rlcore.interfaces:RolloutEngine"], ["engine="]),
            (["actor.bf16.logit_noise=0.5"], ["logit_noise=0.5"]),
            (["actor.bf16.probability_floor=0.5"], ["probability_floor=0.5"]),
            (["actor.bf16.num_gpus=1", "actor.bf16.second_runner=true"], ["second_runner=true"]),
            (["actor.bf16.num_gpus=1", "actor.bf16.async_scheduling=true"], ["async_scheduling"]),
            (["actor.bf16.num_gpus=1", "actor.bf16.fp8_kv_cache=true"], ["fp8_kv_cache=true"]),
            (["rollout.min_p=0.1"], ["rollout.min_p=0.1"]),
            (["correction=dvp"], ["correction=dvp", "min_p"]),
            (["bitwise=true"], ["bitwise=true"]),
            (["learner.lora={publish: adapter}"], ["learner.lora.publish=adapter"]),
            (["schedule=on_policy", "schedule.colocated=true"], ["schedule.colocated=true"]),
            ([*GPUS, "cluster.transport=nccl"], ["cluster.transport=nccl"]),
        )
    ),
    (
        ["actor=sparse", "actor.sparse.speculate={path:x}"],
        ["actor.sparse.speculate", "kind=sparse"],
    ),
    (["actor.bf16.speculate={path:x,tokens:0}"], ["actor.bf16.speculate.tokens=0"]),
    (["actor.bf16.scales=channel"], ["actor.bf16.scales=channel", "kind=bf16"]),
    (
        ["actor=fp8", "actor.fp8.rounding=mxfp4", "actor.fp8.scales=block"],
        ["actor.fp8.scales=block", "rounding=mxfp4", "32 entries"],
    ),
    (
        ["correction.tis.widen_clip=true", "correction.tis.level=sequence"],
        ["correction.tis.widen_clip=true", "level=sequence"],
    ),
    (
        ["correction.tis.widen_clip=true", "algorithm.loss=gspo"],
        ["correction.tis.widen_clip=true", "algorithm.loss=gspo"],
    ),
    (
        ["algorithm=ppo", "critic=model", "critic.bootstrap=true", "algorithm.credit=turn"],
        ["critic.bootstrap=true", "algorithm.credit=turn", "single turn"],
    ),
    (["bitwise=true"], ["bitwise=true", "schedule.max_staleness", "schedule=on_policy"]),
    ([*BITWISE, "rollout.temperature=0.8"], ["bitwise=true", "rollout.temperature=0.8"]),
    ([*BITWISE, "rollout.top_p=0.9"], ["bitwise=true", "rollout.top_p=0.9"]),
    ([*BITWISE, "learner.num_cpus=2"], ["bitwise=true", "learner.num_cpus=2", "use 1"]),
    ([*BITWISE, "learner.max_threads=2"], ["bitwise=true", "learner.max_threads=2", "use 1"]),
    ([*BITWISE, "algorithm=ppo", "critic=model"], ["bitwise=true", "critic.kind=model"]),
    ([*BITWISE, "learner.lora={}"], ["bitwise=true", "learner.lora"]),
    ([*BITWISE, "actor=sparse"], ["bitwise=true", "actor.sparse.kind=sparse"]),
    ([*BITWISE, "actor=fp8"], ["bitwise=true", "actor.fp8.rounding=fp8", "round_as=fp8"]),
    ([*BITWISE, "actor.bf16.dtype=bfloat16"], ["bitwise=true", "actor.bf16.dtype=bfloat16"]),
    ([*BITWISE, "actor.bf16.logit_noise=1"], ["bitwise=true", "actor.bf16.logit_noise=1"]),
    ([*BITWISE, "cluster.cpu_fast_paths=false"], ["bitwise=true", "cluster.cpu_fast_paths=false"]),
    (["learner.round_as=bf16"], ["learner.round_as=bf16", "actor.bf16.rounding"]),
    ([ROUNDED, "learner.round_as=p"], ["learner.round_as=p", "choose one of q"]),
    (
        ["actor=fp8", "learner.round_as=fp8", "actor.fp8.dtype=bfloat16"],
        ["round_as=fp8", "actor.fp8.dtype=float32"],
    ),
    (
        [*ROUND_AS, "learner.dtype=bfloat16", "learner.zero_stage=1"],
        ["round_as=q", "learner.dtype=float32"],
    ),
    (
        [ROUNDED_TO.format("moves: layers, most: 1"), "learner.round_as=q"],
        ["round_as=q", "actor.q.target.moves=layers"],
    ),
    ([*ROUND_AS, "learner.lora={}"], ["round_as=q", "learner.lora"]),
    ([*ROUND_AS, "learner.draft={}"], ["round_as=q", "learner.draft"]),
    (
        [*ROUND_AS, "learner.ranks=2", "learner.tensor_parallel=2"],
        ["round_as=q", "learner.tensor_parallel=2"],
    ),
    (
        [*ROUND_AS, "algorithm=ppo", "critic=value_head"],
        ["round_as=q", "critic.kind=value_head"],
    ),
    (["actor.bf16.num_gpus=2"], ["actor.bf16.num_gpus=2", "tensor_parallel=1", "count"]),
    (
        ["actor.bf16.tensor_parallel=2", "actor.bf16.num_gpus=0.5"],
        ["actor.bf16.num_gpus=0.5", "tensor_parallel=2"],
    ),
    (
        ["actor=sparse", "actor.sparse.tensor_parallel=2"],
        ["actor.sparse.tensor_parallel=2", "kind=sparse"],
    ),
    (
        ["actor.bf16.max_batched_tokens=64"],
        ["actor.bf16.max_batched_tokens=64", "model.max_len=128"],
    ),
    (
        ["learner.attention=flash_attention_2"],
        ["learner.attention=flash_attention_2", "learner.num_gpus"],
    ),
    (["learner.layers=liger"], ["learner.layers=liger", "learner.num_gpus=0", "layers=torch"]),
    (
        [*GPUS, "learner.layers=liger", "learner.ranks=2", "learner.tensor_parallel=2"],
        ["learner.layers=liger", "learner.tensor_parallel=2"],
    ),
    (["learner.fp8=tensor", "learner.zero_stage=3"], ["learner.fp8=tensor", "zero_stage=3"]),
    (["learner.fp8=row", "learner.lora={}"], ["learner.fp8=row", "learner.lora"]),
    (
        ["schedule=on_policy", "learner.layers=compiled", "bitwise=true"],
        ["learner.layers=compiled is not proven with bitwise=true"],
    ),
    (
        ["learner=zero3", "learner.layers=compiled"],
        ["learner.layers=compiled is not proven with learner.zero_stage=3", "layers=torch"],
    ),
    ([*GPUS, "learner.fp8=row", "learner.layers=liger"], ["learner.fp8=row", "layers=liger"]),
    ([*GPUS, "learner.fp8=row", "learner.dtype=float32"], ["learner.fp8=row", "dtype=bfloat16"]),
    (
        ["learner.fp8=tensor", "learner.ranks=2", "learner.tensor_parallel=2"],
        ["learner.fp8=tensor", "learner.tensor_parallel=2"],
    ),
    (["learner.attention=varlen"], ["learner.attention=varlen", "learner.num_gpus"]),
    (["learner.attention=fa4"], ["learner.attention=fa4", "learner.num_gpus"]),
    (
        ["learner.attention=varlen", "learner.num_gpus=1", "learner.dtype=float32"],
        ["learner.attention=varlen", "learner.dtype=bfloat16"],
    ),
    (["learner.num_gpus=2"], ["learner.num_gpus=2", "learner.ranks"]),
    (["learner.max_threads=1"], ["learner.max_threads=1", "learner.num_cpus"]),
    (
        ["learner.max_threads=4", "learner.num_gpus=1", "learner.zero_stage=1"],
        ["learner.max_threads=4", "num_gpus=1"],
    ),
    *(
        (
            ["learner.max_threads=4", "learner.ranks=2", f"learner.{parts}=2"],
            ["learner.max_threads=4", f"learner.{parts}=2"],
        )
        for parts in ("sequence_parallel", "tensor_parallel", "expert_parallel")
    ),
    (
        ["learner.ranks=2", "schedule.groups_per_step=1"],
        ["learner.ranks=2", "schedule.groups_per_step=1"],
    ),
    (
        ["learner.ranks=3", "learner.sequence_parallel=2"],
        ["learner.sequence_parallel=2", "learner.ranks=3", "choose one of 1, 3"],
    ),
    ([*PARTS, "learner.activation_cache_mib=8"], ["sequence_parallel=2", "activation_cache_mib=8"]),
    (
        [*PARTS, "actor=sparse", "learner.train_sparse=true"],
        ["sequence_parallel=2", "train_sparse"],
    ),
    ([*PARTS, "actor=sparse", DISTILL], ["sequence_parallel=2", "learner.distill attends"]),
    (
        [*PARTS, *GPUS, "learner.attention=flash_attention_2"],
        ["sequence_parallel=2", "attention=flash_attention_2", "varlen or sdpa"],
    ),
    (
        [*LAYERS, "learner.sequence_parallel=2"],
        ["learner.tensor_parallel=2", "learner.sequence_parallel=2", "leave one of them at 1"],
    ),
    ([*LAYERS, "learner=zero3"], ["learner.tensor_parallel=2", "zero_stage=3", "0, 1 or 2"]),
    ([*PARTS, "learner.router_replay=true"], ["sequence_parallel=2", "router_replay=false"]),
    *(
        ([*words, "learner.draft={}"], [words[1], "learner.draft", "not trained"])
        for words in (PARTS, LAYERS)
    ),
    *(
        (
            ["learner=zero3", "learner.offload.optimizer=cpu", *words],
            ["is not proven", "learner.offload.optimizer=cpu", says],
        )
        for words, says in (
            (["actor=sparse", DISTILL], "learner.distill"),
            (["learner.draft={}"], "learner.draft"),
        )
    ),
    (
        [*PARTS, "learner=zero3", "learner.offload.optimizer=cpu"],
        ["learner.sequence_parallel=2", "learner.offload.optimizer=cpu", "not proven"],
    ),
    ([*LAYERS, "learner.offload_while_sampling=true"], ["tensor_parallel=2", "offload_while"]),
    ([*LAYERS, "learner.lora={}"], ["learner.tensor_parallel=2", "learner.lora"]),
    ([*LAYERS, "learner.activation_cache_mib=8"], ["tensor_parallel=2", "the same layers"]),
    ([*LAYERS, "actor=sparse", DISTILL], ["learner.tensor_parallel=2", "learner.distill attends"]),
    (["learner.ranks=3", "learner.expert_parallel=2"], ["learner.ranks=3", "choose one of 1, 3"]),
    ([*EXPERTS, "learner=zero3"], ["learner.expert_parallel=2", "zero_stage=3", "0, 1 or 2"]),
    *(
        ([*EXPERTS, f"learner.{word}"], ["is not proven", "learner.expert_parallel=2", says])
        for word, says in (
            ("sequence_parallel=2", "learner.sequence_parallel=2"),
            ("tensor_parallel=2", "learner.tensor_parallel=2"),
            ("router_replay=true", "learner.router_replay=true"),
            ("activation_cache_mib=8", "learner.activation_cache_mib=8"),
            ("offload_while_sampling=true", "learner.offload_while_sampling=true"),
            ("lora={}", "learner.lora"),
            ("draft={}", "learner.draft"),
        )
    ),
    *(
        ([*EXPERTS, "actor=sparse", word], ["is not proven", "learner.expert_parallel=2"])
        for word in (DISTILL, "learner.train_sparse=true")
    ),
    (["cluster.transport=nccl"], ["cluster.transport=nccl", "learner and actor.bf16"]),
    (["cluster.transport=ipc"], ["cluster.transport=ipc", "learner and actor.bf16"]),
    ([*GPUS, "learner.num_gpus=0.5", "cluster.transport=nccl"], ["one GPU", "learner", "use ipc"]),
    ([*GPUS, "cluster.transport=ipc"], ["shares of one", "use nccl"]),
    (
        [*GPUS, "actor.bf16.num_gpus=0.5"],
        ["actor.bf16.num_gpus=0.5", "learner.num_gpus=1", "0.5 each"],
    ),
    (["learner=gpu", "learner.num_gpus=0.5"], ["learner.num_gpus=0.5", "actor.bf16.num_gpus=0 "]),
    (
        [*SHARES, "actor.bf16.num_gpus=0.6"],
        ["learner.num_gpus=0.5", "bf16.num_gpus=0.6", "1 at most"],
    ),
    ([*SHARES, "learner.ranks=2"], ["learner.num_gpus=0.5", "count=1", "learner.ranks=2"]),
    ([*SHARES, "actor.bf16.count=2"], ["learner.num_gpus=0.5", "count=2", "learner.ranks=1"]),
    ([*SHARES, "evaluation.dense_actor=true"], ["learner.num_gpus=0.5", "dense_actor=true"]),
    (
        [*SHARES, "evaluation.dense_actor=true", "cluster.transport=disk"],
        ["shares of 3 must", "learner.num_gpus=0.33", "actor.bf16.num_gpus=0.33"],
    ),
    ([*ONE_GPU, "learner.num_gpus=0.3"], ["shares of 4 must", "actor.draft.num_gpus=0.25"]),
    ([*ONE_GPU, "learner.ranks=2"], ["learner has one rank", "learner.ranks=1"]),
    (
        [*ONE_GPU, "actor.draft.gpu_memory_utilization=0.4"],
        ["2 engines take 0.8", "actor.draft.gpu_memory_utilization=0.35"],
    ),
    ([*SHARES, "cluster.launch.learner_nodes=1"], ["num_gpus=0.5", "learner_nodes=1"]),
    (
        [*GPUS, "cluster.transport=nccl", "actor.bf16.engine=rlcore.interfaces:RolloutEngine"],
        ["actor.bf16.engine", "object_store"],
    ),
    (
        [*GPUS, "cluster.transport=nccl", "+actor.b={num_gpus: 1, dtype: float32}"],
        ["bfloat16 and float32", "actor.*.dtype"],
    ),
    (["+task@evaluation.tasks.digits=arithmetic"], ["evaluation.tasks.digits"]),
    (["learner.train_sparse=true"], ["learner.train_sparse", "actor.bf16.kind=bf16"]),
    ([DISTILL], ["learner.distill", "actor.bf16.kind=bf16"]),
    (
        ["actor=[sparse,bf16]", DISTILL],
        ["learner.distill", "actor.sparse.kind=sparse", "actor.bf16.kind=bf16"],
    ),
    (
        ["actor=sparse", DISTILL, "learner.train_sparse=true"],
        ["learner.distill", "learner.train_sparse=true"],
    ),
    (["actor=sparse", DISTILL, "learner.lora={rank:4}"], ["learner.distill", "learner.lora=null"]),
    (["actor=sparse", DISTILL, "learner.zero_stage=3"], ["learner.zero_stage=3", "0, 1 or 2"]),
    (
        ["actor=sparse", "learner.distill={kl:topk}", "rollout.logprobs_k=0"],
        ["learner.distill.kl=topk", "logprobs_k=0"],
    ),
    (
        ["actor=sparse", DISTILL, "correction=[dvp,mis]"],
        ["correction=[dvp,mis]", "learner.distill"],
    ),
    (
        ["environment=higher"],
        ["environment=higher", "none, openenv, python_tool, rooms, task"],
    ),
    (
        ["environment.name=hi"],
        ["environment.name=hi", "python_tool, rooms, task, textarena", "file.py:Class"],
    ),
    (
        ["environment=task", "actor=sparse", "actor.sparse.sparse.prompt=dense"],
        ["environment.name=task", "actor.sparse.sparse.prompt=dense", "set it to sparse"],
    ),
    (
        ["environment=task", "algorithm.overlong_share=0.5"],
        ["environment.name=task", "algorithm.overlong_share=0.5"],
    ),
    (
        ["environment=task", "environment.step_timeout_s=700"],
        ["environment.step_timeout_s=700", "environment.episode_timeout_s=600"],
    ),
    (
        ["environment=task", "task.grade_weight=0.5"],
        ["environment.name=task", "task.grade_weight=0.5"],
    ),
    (["environment=endpoint"], ["environment.name=endpoint", "model.path", "chat template"]),
    (
        ["environment=endpoint", "model=smollm2", "model.chat_template=off"],
        ["environment.name=endpoint", "model.chat_template=off"],
    ),
    (
        ["environment=endpoint", "model=smollm2", "algorithm.turn_share=1"],
        ["environment.name=endpoint", "algorithm.turn_share=1"],
    ),
    (["environment.max_turns=0"], ["environment.max_turns=0", "greater than 0"]),
    (["algorithm.turn_share=0.5"], ["algorithm.turn_share=0.5", "choose an environment"]),
    (["algorithm.credit=token"], ["algorithm.credit=token", "algorithm.turn_share above 0"]),
    (
        ["environment=task", "algorithm.turn_discount=0.9"],
        ["algorithm.turn_discount=0.9", "algorithm.turn_share above 0"],
    ),
    (
        ["environment=task", "algorithm=rapid", "correction=[rapid]", "algorithm.turn_share=1"],
        ["algorithm.turn_share=1", "correction=rapid"],
    ),
    (
        ["environment=task", "algorithm=dapo", "algorithm.turn_share=1"],
        ["algorithm.turn_share=1", "algorithm.dynamic_sampling=true"],
    ),
    (["experiment=draft_cotrain", "correction=[dvp]"], ["correction=[dvp]", "learner.draft"]),
    (
        [
            *("learner.zero_stage=3", "learner.offload.optimizer=cpu"),
            "learner.offload_while_sampling=true",
        ],
        ["learner.offload_while_sampling=true", "learner.offload.optimizer=cpu", "choose one"],
    ),
    (["learner.offload.optimizer=cpu"], ["learner.zero_stage=3, which is 0", "bfloat16"]),
    (
        ["learner.zero_stage=3", "learner.offload.parameters=cpu"],
        ["learner.offload.parameters=cpu", "learner.offload.optimizer=cpu or nvme"],
    ),
    (
        ["learner.zero_stage=3", "learner.offload.optimizer=nvme"],
        ["learner.offload.optimizer=nvme", "learner.offload.nvme_path"],
    ),
    (
        ["learner.zero_stage=3", "learner.offload.nvme_path=/disk"],
        ["learner.offload.nvme_path=/disk", "optimizer=nvme"],
    ),
    (["learner.dtype=bfloat16"], ["learner.zero_stage=0", "learner.dtype=bfloat16", "1, 2 or 3"]),
    (["learner.num_gpus=1"], ["learner.zero_stage=0", "learner.num_gpus=1", "1, 2 or 3"]),
    (
        ["actor=sparse", DISTILL, "cluster.transport=gloo"],
        ["cluster.transport=gloo", "object_store or disk"],
    ),
    (
        ["cluster.full_weights_every=8", "cluster.transport=disk"],
        [
            "cluster.full_weights_every=8",
            "transport=disk: use object_store or nccl, or full_weights_every=1",
        ],
    ),
    (
        ["cluster.full_weights_every=8", "actor=sparse", DISTILL],
        ["cluster.full_weights_every=8", "learner.distill", "full_weights_every=1"],
    ),
    (
        ["cluster.full_weights_every=8", ADAPTER],
        ["cluster.full_weights_every=8", "publish=adapter"],
    ),
    (
        [*GPUS, "cluster.full_weights_every=8", "cluster.transport=nccl", FP8_ON_GPU],
        ["cluster.full_weights_every=8", "nccl", "actor.q.kind=fp8", "full_weights_every=1"],
    ),
    (
        [*GPUS, "cluster.full_weights_every=8", "learner.num_gpus=0.5", "cluster.transport=ipc"],
        ["cluster.full_weights_every=8", "cluster.transport=ipc", "object_store or nccl"],
    ),
    (["learner.draft={}"], ["learner.draft", "actor=draft"]),
    (
        ["learner.lora={targets: [q_proj, lm_head]}"],
        ["learner.lora.targets=['q_proj', 'lm_head']", "holds lm_head", "layers of the blocks"],
    ),
    (
        ["learner.lora={publish: adapter, rank: 513}"],
        ["learner.lora.publish=adapter", "learner.lora.rank=513", "rank=512", "publish=merged"],
    ),
    (
        [*GPUS, ADAPTER, "cluster.transport=nccl"],
        ["learner.lora.publish=adapter", "cluster.transport=nccl", "object_store", "merged"],
    ),
    (
        ["experiment=draft_cotrain", ADAPTER],
        ["learner.lora.publish=adapter", "learner.draft", "publish=merged"],
    ),
    (
        ["actor=[bf16,fp8]", ADAPTER],
        ["learner.lora.publish=adapter", "actor.fp8", "quantises", "publish=merged"],
    ),
    (
        [ADAPTER, "actor.bf16.rounding=int4"],
        ["learner.lora.publish=adapter", "actor.bf16", "int4", "rounding=none"],
    ),
    (
        [ADAPTER, "actor.bf16.engine=rlcore.interfaces:RolloutEngine"],
        [
            "learner.lora.publish=adapter",
            "actor.bf16.engine=rlcore.interfaces:RolloutEngine",
            "publish=merged",
        ],
    ),
    (
        [
            "actor=sparse",
            "learner.distill={lora:{publish: adapter}}",
            "actor.sparse.engine=rlcore.interfaces:RolloutEngine",
        ],
        ["actor.sparse.kind=sparse is not read", "actor.sparse.engine=rlcore.interfaces:"],
    ),
    (
        ["actor=draft", "actor.draft.draft_path=y", "evaluation.dense_actor=false"],
        ["evaluation.dense_actor=false", "actor.draft"],
    ),
    (["experiment=draft_frozen", "model.path=x"], ["actor.draft.draft_fresh", "model.path=x"]),
]


@pytest.mark.parametrize(
    ("words", "parts"), REFUSED, ids=lambda v: " ".join(v) if v and "=" in v[0] else None
)
def test_refused_in_one_sentence(words, parts):
    with pytest.raises(UserError) as caught:
        load(["run_dir=x", *words])
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    for part in parts:
        assert part in sentence, sentence


def test_what_changed_may_travel_from_gpu_to_gpu():
    several = ["actor.bf16.tensor_parallel=2", "learner.lora={publish: merged}"]
    load(["run_dir=x", *GPUS, *several, "cluster.full_weights_every=8", "cluster.transport=nccl"])


def test_run_dir_is_required():
    with pytest.raises(UserError, match="run_dir"):
        load([])


def test_several_mistakes_are_all_named():
    with pytest.raises(
        UserError, match=r"2 faults(.|\n)*1\. schedule\.steps=y (.|\n)*2\. learner\.lr=x"
    ):
        load(["run_dir=x", "learner.lr=x", "schedule.steps=y"])


@pytest.mark.parametrize("content", ["", "[1]", "a: [", "model: {}", b"\xff\xfe\x00"])
def test_an_unreadable_saved_configuration_is_refused(tmp_path, content):
    file = tmp_path / "config.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError):
        load([f"run_dir={tmp_path}", "resume=auto"])


def test_secrets_are_not_taken_into_a_job_s_script():
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password"):
        with pytest.raises(UserError, match=rf"cluster\.launch\.env\.{name}.*export it") as refusal:
            load(["run_dir=x", "experiment=quickstart", f"cluster.launch.env.{name}=hush"])
        assert "hush" not in str(refusal.value)
    load(
        ["run_dir=x", "experiment=quickstart", "cluster.launch.env.TOKENIZERS_PARALLELISM='false'"]
    )


@pytest.mark.parametrize(
    ("word", "now"),
    [
        ("cluster.whole_every=2", "cluster.full_weights_every"),
        ("algorithm.keep_best=2", "algorithm.train_on_best"),
        ("learner.keep_passes_mib=8", "learner.activation_cache_mib"),
        ("learner.router=replay", "learner.router_replay"),
        ("task.difficulty.keep=0.5", "task.difficulty.resample_rate"),
        ("actor.bf16.cpu_fast_path=false", "cluster.cpu_fast_paths"),
        ("actor=sparse actor.sparse.sparse.sparse_prompt=false", "actor.sparse.sparse.prompt"),
    ],
)
def test_a_former_key_is_refused_with_its_present_name(tmp_path, word, now):
    with pytest.raises(UserError, match=f"is not a key any more: it is called {now} now"):
        load(["experiment=quickstart", f"run_dir={tmp_path}", *word.split()])
