"""Every field of every run, with its meaning. A recipe's config starts from here and changes a few.

Flags override any field: `--config.solver.learning_rate=1e-4`. A field that is not in this file is an error.
"""

from ml_collections import ConfigDict


def _role():
    """Fields of one trained role (proposer, solver)."""
    return ConfigDict(
        dict(
            learning_rate=1e-6,  # peak; constant after the warm-up
            warmup_steps=0,  # linear: step i of n runs at i/n of the rate
            weight_decay=0.01,  # AdamW, matrices only
            beta1=0.9,
            beta2=0.999,
            clip_norm=1.0,  # global gradient norm
            steps=50,  # optimiser steps per phase
            batch=256,  # episodes (documents or questions) per step
            samples=1,  # rollouts per prompt that are trained on
            temperature=1.0,  # of training rollouts; log-probs are of the scaled softmax
            baseline='mean',  # mean | loo (the others' mean: RLOO) | none: what is taken off a reward in its group
            scale='std',  # std | batch (whitened over the batch's tokens: REINFORCE++-baseline) | none
            std_ddof=1,  # 1: sample deviation (verl, torch), 0: population
            singleton='zero',  # zero | raw: advantage of a row alone in its group (Dr. Zero's code: raw)
            skip_uninformative=True,  # leave out rows of advantage 0 (nothing to learn without a KL term)
            loss='token_pg',  # reinforce (no ratio) | token_pg | sequence_pg (GSPO, DSPO) | geometric_pg (GMPO)
            clip_low=0.2,
            clip_high=0.2,
            dual_clip=3.0,  # bound of the loss at negative advantage, as a multiple; 0: off
            aggregation='token',  # token | seq_mean_token_mean | seq_mean_token_sum | constant (Dr. GRPO)
            constant_norm=1.0,  # of 'constant': tokens that a rollout's sum is divided by
            kl_coef=0.0,  # weight of the KL to the initial weights; 0: no reference is kept
            kl_kind='k3',  # k1 | k2 | k3, k1+ | k3+ (that value with k2's gradient)
            entropy_coef=0.0,  # weight of the entropy that is paid for
            minibatches=1,  # optimiser steps per rollout batch (1: the ratio is identically 1)
            old_logp='sampler',  # sampler | trainer (scored again before the first update): what ratios are against
            tis_cap=0.0,  # bound of the weight trainer/sampler that corrects for their difference; 0: none
            tis_level='token',  # token | sequence
            filter_groups=False,  # train on groups whose rewards differ only, and ask on until the batch is full
            fill_rounds=4,  # rounds of asking per step, with the filter; then the batch stays short
            surplus='carry',  # carry | drop: groups beyond a full batch
            train_iterations=-1,  # iterations in which the role learns; -1: all, 0: it only plays
            distill_top_k=0,  # tokens on which the teacher's distribution is matched, plus the rest; 0: no teacher
            distill_coef=(
                0.0,
            ),  # weight of the distillation loss, per iteration (the last one stays)
            distill_kind='reverse',  # reverse (student ‖ teacher) | forward | jsd
            distill_tail=True,  # keep the probability of all other tokens as one outcome
            distill_ema_rate=0.05,  # share of the student that the teacher takes over after every batch
        )
    )


def get_config() -> ConfigDict:
    return ConfigDict(
        dict(
            recipe='drzero',  # which game: a module of zeroplay_jax/selfplay/recipes
            seed=0,  # the whole run is a function of this file and this number
            progress=True,  # progress bars when the terminal is one
            policy=dict(
                path='',  # Hugging Face checkpoint folder; '' is the built-in tiny checkpoint
                dtype='float32',  # of activations (float32 on CPUs; bfloat16 on TPU and GPU)
                remat=False,  # recompute layers in the backward pass
                # what they keep for it: nothing_saveable | dots_with_no_batch_dims_saveable (results of projections)
                remat_policy='nothing_saveable',
                attention='dense',  # of packed rows: dense | splash (a kernel for TPUs; micro.tokens in steps of 128)
                scan=False,  # training passes the layers as a loop: compiles sooner, holds the weights twice
                logit_chunk=1024,  # tokens whose logits exist at one time in scoring
            ),
            mesh=dict(
                replica=1, fsdp=1, model=1
            ),  # devices per axis; -1 in one place: all that are left
            # a learner's state lies in the hosts' memory but for its update; slots exist during rollouts only
            offload=False,
            distributed=dict(
                mode='off',  # off: one process | auto: TPU VMs, SLURM and GKE say who they are | coordinator: as below
                coordinator='',  # host:port of process 0
                processes=1,  # how many; mesh.replica must be a multiple
                process=0,  # which one this is
                heartbeat=100,  # seconds without a sign of life from a process after which the others stop
            ),
            sampler=dict(
                slots=96,  # rollouts decoded together, per set of weights and process
                context=512,  # tokens a slot can hold: prompt + all turns + observations
                chunk=32,  # prefill: tokens per row and call
                fill_rows=16,  # prefill: rows per call
                burst=8,  # decode steps between two looks at the text
                put_rows=16,  # host → device: rows per call
                put_tokens=96,  # host → device: tokens per row and call
            ),
            rollout=dict(
                prompt_tokens=96,  # longest prompt; a longer one is an error of the task and drops it
                turn_tokens=64,  # longest assistant turn
                observation_tokens=128,  # longest observation; longer ones lose their end
                max_turns=5,  # assistant turns; the last one cannot search
                # True: thoughts (…</think>) leave the context when their turn is over, and every context is a row of
                # the batch, as SCOPE's code trains (Qwen3's own template drops them only before the last question)
                drop_thinking=False,
                # keep | drop: whether rollouts that a limit ended are learnt from; a penalty is reward.overlong_buffer
                truncated='keep',
                deterministic=True,  # wait for slow tools (False: a deadline turns them into an error)
                tool_timeout=30.0,  # seconds, only without `deterministic`
            ),
            tools=dict(
                # search_r1: <search>…</search> inline | r_search: with <observation> for the reply
                # qwen: <tool_call>{json}</tool_call> | olmo: <function_calls>search(query="…")</function_calls>
                family='search_r1',
                top_k=3,  # passages per query
                max_queries=3,  # queries of one call that are run
            ),
            weights='separate',  # separate | shared: whether the trained roles are one policy
            shared_optimizer=False,  # with shared weights: one set of optimiser moments for all roles
            prompts='mini',  # mini | paper: which set of role prompts (rollout/prompts.py)
            retrieval=dict(
                kind='world',  # world (miniature worlds, in process) | folder (an index of retrieval.build) | http
                path='',  # folder, http: the index folder; of http only its corpus is read, for documents to ask about
                encoder='',  # folder: where the encoder is now; '' where it was when the index was built
                url='http://127.0.0.1:8000',  # http: a server of the protocol of Search-R1
                timeout=30.0,  # http: seconds per try
                retries=4,  # http
                ready_seconds=600.0,  # http: how long to wait for the server at the start
                cache=100_000,  # answers kept in memory
                most_failed=0.1,  # share of failed searches in a step beyond which the run stops
                overfetch=32,  # candidates scored again exactly, per query
            ),
            world=dict(
                train=(0, 40),  # seeds of the training worlds: first, count
                evaluation=(
                    0,
                    12,
                ),  # seeds of the held-out worlds; nothing of them is seen or searched in training
                near_misses=0.25,  # share of entities that get a document with a near-miss title
            ),
            schedule=dict(
                iterations=3,  # rounds of proposer phase → task generation → solver phase
                hop_ratio=(
                    4,
                    3,
                    2,
                    1,
                ),  # documents asked for 1-, 2-, 3-, 4-hop questions, exact per batch
                group='hop',  # hop (HRPO) | prompt (GRPO): the proposer's group key
                first='solver',  # solver | proposer: who learns first where both learn in a step
                initial_document=True,  # show the proposer its document (False: Dr. Zero's ablation)
                searches_below_hops=0,  # SCOPE: searches asked for are so many fewer than `hops`
            ),
            inputs=dict(
                answers='',  # JSON lines of answers to hide (SSP); '' takes the training worlds'
                questions='',  # JSON lines of questions with answers (DSPO); '' takes the training worlds'
                # JSON lines of documents with hops (Dr. Zero, π-Play, SCOPE); '' draws them from the corpus
                documents='',
                types=(
                    '',
                ),  # of such a file: kinds of task to take ('planning', …); ('',): all of them
                tasks='',  # JSON lines of tasks with rubrics (SCOPE's solver alone); '' lets the challenger make them
                world_questions=300,  # of the training worlds: per hop count
            ),
            reward=dict(
                solves=5,  # solver rollouts that measure a question's difficulty
                difficulty='linear',  # linear: (n−k)/(n−1) inside 0<k<n | parabolic: 4·p·(1−p) | one_minus | triangle
                answer='em',  # em | subem | f1 | judge: what a solver's answer earns
                invalid=0.0,  # SSP: reward of a proposal that is turned away (−0.1: its penalty variant)
                overlong_buffer=0,  # tokens before the end of a slot in which a rollout loses up to 1; 0: none
                code_format=False,  # SCOPE: format scores as its code computes them, not as its paper says
                search_weight=0.1,  # SCOPE: weight of searching in the solver's reward
                target=0.5,  # SCOPE, triangle: mean score at which a task is worth most
                length_factor=True,  # SCOPE: discount long answers
                soft_length=1024,  # SCOPE: tokens up to which they are not
                hard_length=2048,  # SCOPE: tokens from which nearly nothing is left
                format_weight=0.5,  # weight of the format score (0: off)
                grounding=False,  # not in paper or code: pay and pool only questions whose answer stands in
                # the last passage seen and that name the source document
            ),
            pool=dict(
                batch=256,  # documents per generation batch
                batches=0,  # generation batches per iteration; 0: as many as give every solver step new questions
                samples=5,  # proposals per document; the best-formed one is kept
                question_words=50,  # longer questions are cut there (Dr. Zero's code)
                window=(
                    0.0,
                    1.0,
                ),  # keep questions whose measured solve rate lies inside (needs measure > 0)
                measure=0,  # solver rollouts per generated question before it enters the pool; 0: none
            ),
            check=dict(
                on=True,  # SSP: the answerability check; SCOPE: the quality gates
                noise=4,  # SSP: other proposers whose passages are mixed in
                unit='trajectory',  # trajectory (all their passages: SSP's code) | document (one of each)
                code=False,  # SSP: the stricter rule gate of its code
            ),
            fill=dict(
                kind='pad',  # pad | resample | replay_full | replay_reset: what stands in for questions that fell away
                period=10,  # replay_reset: steps after which the pool is emptied
                rounds=5,  # resample: rounds per step
            ),
            privileged=dict(
                kind='qcp',  # none | answer | answer_hop | qcp_partial | qcp: what a teacher is shown
                prompt_tokens=256,  # longest prompt of the teacher; passages are left out beyond
                tokens=768,  # one packed row of the teacher
            ),
            judge=dict(
                kind='rule',  # rule (miniature worlds) | policy (the initial weights) | endpoint
                url='http://127.0.0.1:8001/v1',  # endpoint: an OpenAI-compatible server; its key is OPENAI_API_KEY
                model='judge',  # endpoint: name of the model there
                rubric_model='',  # endpoint: another one that writes rubrics; '' is `model`
                grade_model='',  # endpoint: another one that grades by them; '' is `model`
                temperature=0.0,
                tokens=512,  # longest reply
                timeout=60.0,  # endpoint: seconds per try
                retries=3,  # endpoint
                most_failed=0.5,  # share of judgements without a verdict in a step beyond which the run stops
                rubrics=(3, 5),  # fewest and most items of a rubric list
            ),
            proposer=_role(),
            solver=_role(),
            micro=dict(rows=8, tokens=512),  # one packed micro-batch of the learner
            eval=dict(
                every=0,  # solver steps between evaluations inside a phase; 0: only at the start and the end
                questions=100,  # per hop count; of a file: so many of all its lines
                file='',  # JSON lines of questions with answers, for any corpus but the worlds
                tasks='',  # likewise of open tasks with rubrics, for the judge; scope has some of the worlds
                hops=(1, 2, 3, 4),
            ),
            checkpoint=dict(every=1, keep=2),  # steps between checkpoints; how many stay
            log_trajectories=16,  # about so many rollouts per step are written for the report: whole questions
        )
    )
