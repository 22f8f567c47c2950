"""Every config field, once: type, default, bounds and meaning (those of rollouts and slots: settings/rollouts.py).

Users write ml_collections configs (configs/*.py) and flags (`--config.FIELD=VALUE`); this schema is
behind both. The text below a field is its documentation (docs/configuration.md is generated from
it). A recipe adds a section of its own in the same form (`Recipe.settings`).
"""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from zeroplay_jax.objectives.registry import BUILT_IN_LOSSES
from zeroplay_jax.settings.kinds import (
    AbsentSection,
    DistillCoefficients,
    Fraction,
    HopRatio,
    Hops,
    InputPath,
    MeshAxis,
    NonNegativeFloat,
    NonNegativeInt,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
    Problem,
    RequestFields,
    RubricCount,
    Section,
    Window,
    WorldSeeds,
    changes,
    one_of_or_function,
    requires,
)
from zeroplay_jax.settings.rollouts import MOST_KEPT, Rollout, Sampler

# The linear layers of a decoder layer, all of which can have adapters. Gated delta nets have other ones in place of
# queries, keys, values and their output.
LINEARS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')
ALL_LINEARS = (*LINEARS, 'in_proj_qkv', 'in_proj_z', 'out')


class Adapters(Section):
    """Low-rank adapters over one frozen base ([adapters](adapters.md))."""

    rank: NonNegativeInt = 0
    """Rank of the update of an adapted layer; 0: full fine-tuning."""
    alpha: PositiveFloat = 32.0
    """Updates are multiplied by alpha / rank."""
    linears: Annotated[
        tuple[str, ...],
        requires(
            lambda x: x and set(x) <= set(ALL_LINEARS) and len(set(x)) == len(x),
            f'give some of {", ".join(ALL_LINEARS)}, each once',
        ),
    ] = LINEARS
    """Adapted linear layers. Gated delta nets (Qwen3.5) have `in_proj_qkv`, `in_proj_z` and `out` besides."""
    quantize: Literal['none', 'int8'] = 'none'
    """int8 halves the memory of linear layers of the base and changes it a little."""
    merge: bool = False
    """Also export whole weights, to policy/<weights>-merged."""

    def conflicts(self) -> Iterator[Problem]:
        """Yields settings of adapters without a rank."""
        if not self.rank:
            text = 'full fine-tuning has neither adapters nor a frozen base; set policy.adapters.rank to a rank'
            yield from changes(self, Adapters(), text)


class Bucket(Section):
    """Runs with --workdir=gs://bucket/path ([workdirs in a bucket](buckets.md))."""

    spool: Annotated[str, requires(lambda x: '://' not in x, 'name a local folder')] = ''
    """Local folder in which such a run works, not shared by hosts, with room for checkpoint.keep + 2 checkpoints; '':
    in the user's cache."""
    seconds: PositiveFloat = 600.0
    """How long a failed upload is repeated before the run ends."""


class Mesh(Section):
    """Devices per mesh axis; one may be -1: all that remain."""

    replica: MeshAxis = 1
    """Replicas of the weights, a multiple of the processes."""
    fsdp: MeshAxis = 1
    """Shards of weights and batch rows."""
    model: MeshAxis = 1
    """Tensor-parallel shards."""

    def conflicts(self) -> Iterator[Problem]:
        """Yields a second axis of -1, which means all remaining devices."""
        free = [axis for axis, size in self.items() if size == -1]
        for axis in free[1:]:
            yield Problem(axis, f'only one axis can be -1, and mesh.{free[0]} is; give a number')


class Distributed(Section):
    """Several processes in one run."""

    mode: Literal['off', 'auto', 'coordinator'] = 'off'
    """auto: addresses from TPU VMs, SLURM or GKE; coordinator: as below."""
    coordinator: str = ''
    """host:port of process 0."""
    processes: PositiveInt = 1
    """Number of processes."""
    process: NonNegativeInt = 0
    """Index of this process."""
    heartbeat: PositiveInt = 100
    """Seconds without a sign of life after which the other processes stop."""

    def conflicts(self) -> Iterator[Problem]:
        """Yields numbers and addresses of processes that cannot work."""
        if self.mode != 'coordinator':
            # Without an address each process would run alone, as the first one.
            if self.processes > 1 and self.mode == 'off':
                text = 'the processes have no address to meet at; set distributed.mode'
                yield Problem('processes', text)
            return
        address = re.fullmatch(r'[^:\s]+:(\d+)', self.coordinator)
        if not address or not 0 < int(address[1]) < 1 << 16:
            yield Problem('coordinator', 'not an address; give host:port of process 0')
        if self.process >= self.processes:
            yield Problem('process', f'there are {self.processes}; count from 0')


class Judge(Section):
    """Verdicts where no string comparison decides. Fields marked `endpoint` are read with that kind only."""

    kind: Literal['rule', 'policy', 'endpoint'] = 'rule'
    """rule (miniature worlds), policy (initial weights), endpoint (a server)."""
    url: str = 'http://127.0.0.1:8001/v1'
    """endpoint: OpenAI-compatible server; the key is in OPENAI_API_KEY."""
    model: str = 'judge'
    """endpoint: the model's name."""
    rubric_model: str = ''
    """endpoint: model that writes rubrics; '': `model`."""
    grade_model: str = ''
    """endpoint: model that grades by rubrics; '': `model`."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature."""
    tokens: PositiveInt = 512
    """Longest reply."""
    grade_tokens: NonNegativeInt = 0
    """Longest reply that grades by a rubric; 0: `tokens`."""
    request: RequestFields = ''
    """endpoint: further fields of the request as JSON; null removes one. For reasoning models:
    `{"max_completion_tokens": 4096, "temperature": null}`."""
    timeout: PositiveFloat = 60.0
    """endpoint: seconds per attempt."""
    retries: NonNegativeInt = 3
    """endpoint: further attempts."""
    # Higher than for searches: small judges often write replies that cannot be parsed.
    max_failure_rate: Fraction = 0.5
    """Share of failed judgements in a step above which the run stops."""
    rubrics: RubricCount = (3, 5)
    """Fewest and most items of a rubric list."""
    at_once: PositiveInt = 64
    """`evaluate --workdir`, ratings: concurrent judgements."""


Steps = Annotated[
    tuple[int, ...],
    requires(lambda x: all(step >= 0 for step in x), 'give numbers of steps, such as (2, 3)'),
]


class Log(Section):
    """Destinations of metrics, and what an audit reads."""

    writers: tuple[Literal['tensorboard', 'wandb'], ...] = ('tensorboard',)
    """Where metrics go beside metrics.jsonl: tensorboard, wandb. The last must be installed, and is set up by its own
    environment variables (WANDB_PROJECT, WANDB_MODE)."""
    rows: Steps = ()
    """Numbers of steps whose trained rollouts go to rows.jsonl (100 kB each of 4,000 tokens), with the weights
    before and after in step<number>/, for [an audit](results.md#the-audit)."""


class Profile(Section):
    """Traces of jax.profiler, in profile/ of the workdir ([where the time goes](tpu-gpu.md#where-the-time-goes))."""

    steps: Steps = ()
    """Numbers of traced steps; avoid steps that compile."""


class Policy(Section):
    """The model."""

    path: str = ''
    """Hugging Face folder, hf://owner/model, or adapter folder, which is added to its base; '': the built-in policy.
    `evaluate`, `ask`: also http(s)://…/v1#MODEL."""
    request: RequestFields = ''
    """http(s): as judge.request."""
    adapters: Adapters = Adapters()
    dtype: Literal['float32', 'bfloat16'] = 'float32'
    """Dtype of activations."""
    remat: bool = False
    """Recompute layers in the backward pass; on CPUs only with `scan`."""
    attention: Literal['dense', 'blocked', 'splash'] = 'dense'
    """Attention in updates: dense; blocked, whose memory is linear in micro.tokens; splash, a TPU kernel (micro.tokens:
    multiples of 128)."""
    scan: bool = False
    """Run the layers of an update as a loop: compiles faster, holds the weights twice."""
    logit_chunk: PositiveInt = 1024
    """Tokens whose logits exist at the same time."""
    logits: Literal['all', 'trained'] = 'all'
    """Compute logits of all tokens, or of those that the policy wrote (less work)."""


class Tools(Section):
    """Tools and how the policy calls them ([tools](tools.md))."""

    names: tuple[str, ...] = ('search',)
    """search, open, mcp, or package.module:attribute."""
    syntax: Literal['search_r1', 'r_search', 'qwen', 'olmo'] = 'search_r1'
    """search_r1: <search>…</search>; r_search: the same, results in <observation>; qwen: <tool_call>{json}</tool_call>;
    olmo: <function_calls>search(query="…")</function_calls>."""
    top_k: PositiveInt = 3
    """search: passages per query."""
    max_failure_rate: Fraction = 0.5
    """Share of failed calls of one tool in a step above which the run stops."""
    mcp_servers: str = 'http://127.0.0.1:8000/mcp'
    """mcp: JSON file with "mcpServers", or a server's address."""
    mcp_seconds: PositiveFloat = 60.0
    """mcp: time limit of a call, always."""


class Retrieval(Section):
    """Corpus and index."""

    kind: Literal['world', 'folder', 'http'] = 'world'
    """world (miniature worlds), folder (an index of zeroplay index), http (a search server)."""
    path: str = ''
    """Index folder; for http only where documents of the corpus are read."""
    encoder: str = ''
    """folder: text encoder; '': where it was when the index was built."""
    url: str = 'http://127.0.0.1:8000'
    """http: server with Search-R1's protocol."""
    max_failure_rate: Fraction = 0.1
    """Share of failed searches in a step above which the run stops."""
    held_out: InputPath = ''
    """folder, http: JSON lines (document_id, title) of passages that only evaluations find; '': none."""


class World(Section):
    """The miniature world."""

    train: WorldSeeds = (0, 40)
    """Training worlds: (first seed, count)."""
    evaluation: WorldSeeds = (0, 12)
    """Held-out worlds: (first seed, count)."""
    near_misses: Fraction = 0.25
    """Share of entities with a distractor: a document of similar title."""


class Schedule(Section):
    """Iterations and the distribution of hops."""

    iterations: PositiveInt = 3
    """Iterations of proposer, generation and solver phase."""
    hop_ratio: HopRatio = (4, 3, 2, 1)
    """Exact shares of questions of 1, 2, … hops in every batch; dspo on worlds: equal shares of these hops."""
    repeat_documents: bool = False
    """Generate questions on the documents that the proposer was trained on in the iteration, not on further ones."""
    initial_document: bool = True
    """Show the proposer its document."""


class Inputs(Section):
    """Files of JSON lines. '' takes what the miniature worlds or the corpus have."""

    answers: InputPath = ''
    """SSP: answers to hide."""
    questions: InputPath = ''
    """DSPO: questions with answers."""
    documents: InputPath = ''
    """Dr. Zero, π-Play, SCOPE: documents with hops."""
    types: Annotated[
        tuple[str, ...],
        requires(lambda x: x == ('',) or x and all(x), "give names of types, or ('',) alone"),
    ] = ('',)
    """SCOPE: types of task, in equal parts; ('',): those of `documents`."""
    tasks: InputPath = ''
    """SCOPE: open tasks with rubrics, in place of the challenger's."""
    world_questions: PositiveInt = 300
    """Training worlds: questions per hop count."""


class Reward(Section):
    """Rewards shared by recipes."""

    # n of Dr. Zero eq. 4, whose n − 1 must not be 0.
    solves: Annotated[
        int, requires(lambda x: x >= 2, 'give 2 or more: one attempt cannot be partly solved')
    ] = 5
    """Solver rollouts that measure a question's difficulty."""
    difficulty: Annotated[
        str, one_of_or_function('linear', 'parabolic', 'one_minus', 'triangle', 'solvable')
    ] = 'linear'
    """Proposer's reward for k of n solved: linear: (n−k)/(n−1) inside 0<k<n; parabolic: 4·p·(1−p); one_minus; triangle;
    solvable: 1 inside 0<k<n; or package.module:function."""
    answer: Annotated[str, one_of_or_function('em', 'subem', 'f1', 'judge')] = 'em'
    """Solver's reward: em, subem, f1, judge, or package.module:function."""
    target: OpenFraction = 0.5
    """triangle: mean score with the highest reward."""
    format_weight: NonNegativeFloat = 0.5
    """Weight of the format score."""


class Pool(Section):
    """Generation of the questions that the solver trains on."""

    batch: PositiveInt = 256
    """Documents per generation step."""
    batches: NonNegativeInt = 0
    """Generation steps per iteration; 0: enough for new questions in every solver step."""
    samples: PositiveInt = 5
    """Proposals per document; one is kept: the best-formed (Dr. Zero) or the first in `window` (SCOPE)."""
    window: Window = (0.0, 1.0)
    """Keep questions whose solve rate (SCOPE: mean score) is inside; Dr. Zero, π-Play: needs measure."""
    measure: NonNegativeInt = 0
    """Solver rollouts per generated question; 0: none (SCOPE: reward.solves)."""
    target: NonNegativeInt = 0
    """Questions at which generation ends, at the latest after `batches`; 0: run all. The solver repeats questions if
    there are too few."""


class Privileged(Section):
    """What the distillation teacher sees."""

    kind: Literal['none', 'answer', 'answer_hop', 'qcp_partial', 'qcp'] = 'qcp'
    """Nothing, the answer, answer and hop count, half or all of the construction path."""
    prompt_tokens: PositiveInt = 256
    """Longest teacher prompt; passages are cut to titles until it fits."""
    tokens: PositiveInt = 768
    """Length of a packed teacher row."""


class MicroBatch(Section):
    """A packed micro-batch of the learner."""

    rows: PositiveInt = 8
    """Packed rows."""
    tokens: PositiveInt = 512
    """Tokens per packed row."""
    order: Literal['arrival', 'longest_first'] = 'arrival'
    """Packing order; longest_first needs fewer rows."""
    weights: Literal['masters', 'published'] = 'masters'
    """masters: gather the float32 weights for every micro-batch (least memory); published: the sampler's, once per
    update."""


class Evaluation(Section):
    """Held-out evaluation inside a run."""

    every: NonNegativeInt = 0
    """Steps of the evaluated role between evaluations; 0: only at start and end."""
    questions: PositiveInt = 100
    """Questions per hop count (miniature worlds), or in all (a fixed sample of each file)."""
    file: InputPath = ''
    """JSON lines of questions with answers, for any corpus but the miniature worlds; several, with commas between, have
    a curve each; em/mean pools their questions."""
    tasks: InputPath = ''
    """JSON lines of open tasks with rubrics; SCOPE has its own for miniature worlds."""
    metric: Annotated[str, one_of_or_function('none', 'subem', 'f1', 'judge')] = 'none'
    """Score beside exact match: none, subem, f1, judge, or package.module:function."""
    hops: Hops = (1, 2, 3, 4)
    """Hop counts on the miniature worlds."""


class Checkpoint(Section):
    """Checkpoints of a run."""

    every: PositiveInt = 1
    """Steps between checkpoints; evaluations count as steps."""
    keep: PositiveInt = 2
    """Checkpoints to keep."""
    best: Annotated[
        str,
        requires(
            lambda x: not x or x.startswith(('em/', 'rubrics/')),
            'give a metric of evaluations such as em/mean, em/hop1 or rubrics/mean',
        ),
    ] = ''
    """Evaluation metric, such as em/mean (of up to 3 hops), whose best checkpoint is also kept in best/."""
    iterations: bool = False
    """Keep the policies of every iteration's end, in the sampler's dtype: --policy=WORKDIR@iteration1."""


class Compilation(Section):
    """Cache of compiled programs."""

    cache: Annotated[
        str,
        requires(
            lambda x: '://' not in x and not pathlib.Path(x).is_file(),
            'name a folder, which is created if it is missing',
        ),
    ] = ''
    """Its folder, which runs may share; '': JAX's own setting (JAX_COMPILATION_CACHE_DIR)."""


class TrainedRole(Section):
    """A trained role, such as proposer or solver."""

    learning_rate: PositiveFloat = 1e-6
    """Peak; constant after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Updates of the linear warm-up."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW, matrices only."""
    clip_norm: PositiveFloat = 1.0
    """Global gradient norm."""
    steps: NonNegativeInt = 50
    """Training steps per phase."""
    batch: PositiveInt = 256
    """Documents or questions per step."""
    samples: PositiveInt = 1
    """Trained rollouts per prompt."""
    prompt_tokens: NonNegativeInt = 0
    """Longest prompt; 0: rollout.prompt_tokens."""
    temperature: PositiveFloat = 1.0
    """Of training rollouts and their log-probs."""
    top_p: Annotated[float, requires(lambda x: 0 < x <= 1, 'give more than 0, at most 1')] = 1.0
    """Tokens are drawn from the fewest ids that have this probability together, 512 at most; 1: from all ([what the
    loss reads](concepts.md#top-p-and-top-k))."""
    top_k: Annotated[int, requires(lambda x: 0 <= x <= MOST_KEPT, f'give 0 to {MOST_KEPT}')] = 0
    """Tokens are drawn from so many of the likeliest ids; 0: from all. top_p then counts within these."""
    advantage: Annotated[str, one_of_or_function('group', 'turn')] = 'group'
    """Of rollouts by their outcomes (group), of turns by what follows them
    ([turn](../zeroplay_jax/objectives/README.md#an-advantage-per-turn)), or package.module:function."""
    baseline: Literal['mean', 'loo', 'value', 'none'] = 'mean'
    """Subtracted from a reward: mean of the group, mean of its other rows (RLOO), a value network (PPO), or none."""
    scale: Literal['std', 'batch', 'none'] = 'std'
    """Divisor of advantages: deviation of the group, of the batch's tokens (REINFORCE++-baseline, PPO), or none."""
    singleton: Literal['zero', 'raw'] = 'zero'
    """Advantage of a row alone in its group."""
    loss: Annotated[str, one_of_or_function(*BUILT_IN_LOSSES)] = 'token_pg'
    """A built-in loss ([which](../zeroplay_jax/objectives/README.md#your-own-loss-or-reward)) or
    package.module:function."""
    # DAPO clips higher above 1 (0.28); sequence ratios (GSPO) are clipped at 3e-4 and 4e-4.
    clip_low: Annotated[float, requires(lambda x: 0 < x <= 1, 'give more than 0, at most 1')] = 0.2
    """Ratio clip below 1."""
    clip_high: PositiveFloat = 0.2
    """Ratio clip above 1."""
    dual_clip: Annotated[
        float,
        requires(lambda x: x == 0 or 1 < x < math.inf, 'give more than 1, or 0 to switch it off'),
    ] = 3.0
    """Bound of the loss at negative advantage, as a multiple; 0: off."""
    aggregation: Literal['token', 'seq_mean_token_mean', 'seq_mean_token_sum', 'constant'] = 'token'
    """Mean over tokens, over sequences, or sum over a constant (Dr. GRPO)."""
    constant_norm: PositiveFloat = 1.0
    """constant: divisor of a rollout's sum."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the initial weights; 0: no reference policy."""
    kl_kind: Literal['k1', 'k2', 'k3', 'k1+', 'k3+'] = 'k3'
    """KL estimator; k1+ and k3+ have the gradient of k2."""
    entropy_coef: NonNegativeFloat = 0.0
    """Entropy bonus coefficient."""
    minibatches: PositiveInt = 1
    """Optimiser steps per batch; with 1 the ratio is 1, up to rounding."""
    old_logp: Literal['sampler', 'trainer'] = 'sampler'
    """Denominator of the ratio: log-probs of the sampler, or of the trainer before the update."""
    tis_cap: NonNegativeFloat = 0.0
    """Cap of the importance weight trainer/sampler (truncated importance sampling); 0: none. Needs
    old_logp=trainer."""
    tis_level: Literal['token', 'sequence'] = 'token'
    """Level of that weight."""
    filter_groups: bool = False
    """Dynamic filter: train on groups with reward variance, sampling until the batch is full."""
    fill_rounds: PositiveInt = 4
    """Sampling rounds of the filter; then the batch stays short."""
    surplus: Literal['carry', 'drop'] = 'carry'
    """Groups beyond a full batch: carried to the next step, or dropped."""
    train_iterations: Annotated[int, Field(ge=-1)] = -1
    """Iterations in which the role is trained; -1: all."""
    distill_top_k: NonNegativeInt = 0
    """Tokens on which the teacher is matched; 0: no teacher."""
    distill_coef: DistillCoefficients = (0.0,)
    """Weight of distillation per iteration; the last one stays."""
    # π-Play's text leaves the direction open; reverse is that of the work it cites (SDPO).
    distill_kind: Literal['reverse', 'forward', 'jsd'] = 'reverse'
    """reverse: KL(student ‖ teacher); forward; jsd."""
    distill_tail: bool = True
    """Match all other tokens as one outcome."""
    distill_ema_rate: Fraction = 0.05
    """Share of the student in each update of the EMA teacher."""
    adapter: InputPath = ''
    """PEFT folder that the role starts from; needs policy.adapters.rank."""

    def conflicts(self) -> Iterator[Problem]:
        """Yields groups, updates and corrections that contradict each other."""
        # A group of equal rewards has deviation 0: without a baseline its advantages are the reward divided by the
        # epsilon.
        if self.baseline == 'none' and self.scale == 'std':
            text = 'without a baseline, dividing by the deviation inflates equal rewards; set scale=none too'
            yield Problem('baseline', text)
        if self.baseline == 'value' and self.scale == 'std':
            text = 'a value network compares tokens, not the rollouts of a group; give batch, as PPO in verl, or none'
            yield Problem('scale', text)
        # Unequal minibatches would weigh rollouts differently, as SSP's code does. Those of a prompt stay together.
        if self.batch % self.minibatches:
            text = f'the {self.batch} prompts of a step (batch) are not divisible by it; give a divisor'
            yield Problem('minibatches', text)
        if self.tis_cap and self.old_logp == 'sampler':
            text = 'it compares trainer and sampler, and only the sampler is evaluated; set old_logp=trainer'
            yield Problem('tis_cap', text)
        if self.filter_groups and self.surplus == 'carry' and self.old_logp == 'trainer':
            text = 'carried-over groups would be scored by newer weights, which hides their age; set surplus=drop'
            yield Problem('old_logp', text)
        if self.distill_top_k and not any(self.distill_coef):
            # The teacher would cost a forward pass per step and change nothing.
            yield Problem('distill_coef', 'the teacher has no weight; give one')


# Fields that only roles of `Recipe.filterable_roles` and `Recipe.distillable_roles` have.
FILTER_FIELDS = ('filter_groups', 'fill_rounds', 'surplus')
DISTILL_FIELDS = (
    'distill_top_k',
    'distill_coef',
    'distill_kind',
    'distill_tail',
    'distill_ema_rate',
)


class ValueNetwork(Section):
    """Value networks of roles with baseline=value (PPO). Warm-up, AdamW and clip_norm are those of the role."""

    learning_rate: NonNegativeFloat = 0.0
    """Peak; 0: ten times the policy's."""
    value_clip: NonNegativeFloat = 0.5
    """Most that a value may move in a step; 0: no limit."""
    discount: Fraction = 1.0
    """γ per trained token."""
    gae_lambda: Fraction = 1.0
    """λ of GAE; 1: reward minus value."""


class Run(Section):
    """A run. Sections of recipes and of trained roles come in addition."""

    recipe: str = 'drzero'
    """Built-in recipe, or package.module of your own."""
    seed: NonNegativeInt = 0
    """A run is a function of config and seed."""
    progress: bool = True
    """Progress bars, and lines of progress where no terminal is attached."""
    stop_after_empty_steps: NonNegativeInt = 2
    """Steps in a row that train nothing after which the run stops with [exit status
    3](learning-nothing.md#while-it-runs); 0: never."""
    stop_at_alarms: bool = True
    """[Alarms](learning-nothing.md#alarms) stop the run with exit status 4; false: they warn."""
    policy: Policy = Policy()
    mesh: Mesh = Mesh()
    cpu_devices: PositiveInt = 1
    """JAX devices of a CPU. One per core, with mesh.replica=-1, is fastest for small models. XLA_FLAGS has priority."""
    offload: bool = False
    """Keep learner state in host memory except during its update, and free the KV cache then."""
    distributed: Distributed = Distributed()
    sampler: Sampler = Sampler()
    rollout: Rollout = Rollout()
    tools: Tools = Tools()
    weights: Literal['separate', 'shared'] = 'separate'
    """Trained roles are separate policies, or one."""
    shared_optimizer: bool = False
    """With shared weights: one set of optimiser moments."""
    prompts: str = 'mini'
    """mini, numbered: ours, short, for built-in policies; full: ours with full instructions; or a [TOML
    file](papers.md#prompts)."""
    retrieval: Retrieval = Retrieval()
    world: World = World()
    schedule: Schedule = Schedule()
    inputs: Inputs = Inputs()
    reward: Reward = Reward()
    pool: Pool = Pool()
    privileged: Privileged = Privileged()
    judge: Judge = Judge()
    micro: MicroBatch = MicroBatch()
    value_network: ValueNetwork = ValueNetwork()
    eval: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    bucket: Bucket = Bucket()
    compilation: Compilation = Compilation()
    log: Log = Log()
    profile: Profile = Profile()
    log_trajectories: NonNegativeInt = 16
    """Approximate number of rollouts per step in trajectories.jsonl."""


class Config(Run):
    """The settings of a run that was checked: frozen, with the sections of its recipe and of its trained roles.

    `configuration.fields.frozen` makes it of the ConfigDict that a user writes. Sections that are no fields of `Run`
    are `config.name` or `config[name]`, and unknown to type checkers.
    """

    # No field, unless the recipe has a pool: its defaults would size a run that cannot set them.
    pool: ClassVar[Pool]  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        # Names that begin so are Python's and pydantic's, which ask whether they are there.
        if name.startswith('_'):
            raise AttributeError(name)
        raise AbsentSection(self.recipe, name)
