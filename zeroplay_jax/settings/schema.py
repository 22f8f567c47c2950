"""Every config field, once: type, default, bounds and meaning.

Users write ml_collections configs (configs/*.py) and flags (`--config.FIELD=VALUE`); this schema is
behind both. The text below a field is its documentation (docs/configuration.md is generated from
it). A recipe adds a section of its own in the same form (`Recipe.settings`).
"""

from __future__ import annotations

import math
import pathlib
from typing import Annotated, Literal

from pydantic import Field

from zeroplay_jax.objectives.loss_properties import BUILT_IN_LOSSES
from zeroplay_jax.settings.kinds import (
    BelowOne,
    DistillCoefficients,
    DocumentsFile,
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
    Prices,
    RequestFields,
    RubricCount,
    Section,
    Window,
    WorldSeeds,
    one_of_or_function,
    requires,
)
from zeroplay_jax.settings.rollouts import Rollout, Sampler

# ---- adapters --------------------------------------------------------------------------------------


# The linear layers of a decoder layer, all of which can have adapters.
LINEARS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')


class Adapters(Section):
    """Low-rank adapters of all roles over one frozen base (docs/adapters.md)."""

    rank: NonNegativeInt = 0
    """Rank of the trained update of every adapted linear layer; 0: full fine-tuning."""
    alpha: PositiveFloat = 32.0
    """The product of an adapter is multiplied with alpha / rank."""
    linears: Annotated[
        tuple[str, ...],
        requires(
            lambda x: x and set(x) <= set(LINEARS) and len(set(x)) == len(x),
            f'give some of {", ".join(LINEARS)}, each once',
        ),
    ] = LINEARS
    """Adapted linear layers."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay of adapters, in place of <role>.weight_decay: it pulls the policy to the base."""
    quantize: Literal['none', 'int8'] = 'none'
    """Linear layers of the base: in policy.dtype, or int8 with a scale per output channel, which takes half the
    memory and changes the base a little."""
    merge: bool = False
    """Also export every trained policy as a whole folder, policy/<weights>-merged."""


# ---- alarms ----------------------------------------------------------------------------------------
#
# What they watch is in `training.outcome`.


class Alarm(Section):
    """Levels of one watched figure."""

    warn: NonNegativeFloat = 0.0
    """Level from which a line warns; 0: never."""
    stop: NonNegativeFloat = 0.0
    """Level from which the run is saved and stopped with exit status 4; 0: never."""
    steps: PositiveInt = 3
    """Steps in a row that must reach a level."""


class Alarms(Section):
    """Figures that show a run going wrong. Each has three fields: `warn`, the level from which a line warns; `stop`,
    the level from which the run is saved and stopped with exit status 4; and `steps`, the number of steps in a row that
    must reach the level. 0 switches a level off. All of them may be changed when a run is resumed
    ([what they watch](learning-nothing.md#alarms))."""

    # The mean difference in float32 is below 1e-6, in bfloat16 of the order of 0.01; a few updates between sampling and
    # training add as much again.
    sampler_gap: Alarm = Alarm(warn=0.03, stop=0.2)
    """Mean difference between the probabilities that sampler and trainer compute for the sampled tokens."""
    # Small policies that have nearly solved their task are healthy at 0.03.
    entropy: Alarm = Alarm(warn=0.01)
    """Entropy of the next token, in nats, at most."""
    length: Alarm = Alarm(warn=3.0)
    """Sampled tokens per rollout as a multiple of the mean of the first three steps of the same phase."""
    # A policy may need some steps to learn how calls are written.
    tool_errors: Alarm = Alarm(warn=0.5, stop=0.9, steps=5)
    """Share of calls that could not be parsed, were refused, failed or timed out."""
    # A search that finds nothing at all is an empty index: no healthy policy writes only such queries.
    empty_searches: Alarm = Alarm(warn=0.5, stop=1.0, steps=2)
    """Share of searches that find no passage. The stop has exit status 3; with it an evaluation stops, too, if none of
    its searches finds a passage."""
    no_call: Alarm = Alarm(warn=0.8)
    """Share of answering rollouts without any call."""
    no_evidence: Alarm = Alarm(warn=0.9)
    """Share of correct answers that no result of the rollout's calls contains."""
    duplicates: Alarm = Alarm(warn=0.5)
    """Share of proposed questions that another task of the same step has, too."""
    judge_agreement: Alarm = Alarm(warn=0.5)
    """Share of a judge's verdicts that agree with the accepted answers, at most."""
    # `judge.max_failure_rate` stops a run whose judge is gone.
    judge_lost: Alarm = Alarm(warn=0.3)
    """Share of judgements that failed or could not be read."""
    staleness: Alarm = Alarm(warn=3.0)
    """Training steps between the sampling of a rollout and its update."""
    # A single update that is skipped does no harm: half of them, twice in a row, is no accident.
    nonfinite: Alarm = Alarm(warn=0.001, stop=0.5, steps=2)
    """Share of updates or rewards that are not finite. Weights that are not finite stop the run at once, whatever the
    levels are."""


# ---- bucket ----------------------------------------------------------------------------------------


class Bucket(Section):
    """Runs with --workdir=gs://bucket/path ([workdirs in a bucket](buckets.md))."""

    spool: Annotated[str, requires(lambda x: '://' not in x, 'name a local folder')] = ''
    """Local folder in which such runs work before their files are uploaded; '' is in the user's cache
    ($XDG_CACHE_HOME, ~/.cache). It needs room for checkpoint.keep + 2 checkpoints. Several hosts need not share it."""
    seconds: PositiveFloat = 600.0
    """How long an upload is tried again before the run ends. With one process, what it saved stays in the local folder
    and is uploaded by the same command; with several, the run resumes from the newest complete step in the bucket."""


# ---- devices and processes -------------------------------------------------------------------------


class Mesh(Section):
    """Devices per mesh axis; -1 for at most one axis: all devices that remain."""

    replica: MeshAxis = 1
    """Replicas of the weights: one or several per process."""
    fsdp: MeshAxis = 1
    """Shards of weights and batch rows."""
    model: MeshAxis = 1
    """Tensor-parallel shards."""


class Distributed(Section):
    """Several processes in one run."""

    mode: Literal['off', 'auto', 'coordinator'] = 'off'
    """off: one process; auto: TPU VMs, SLURM and GKE provide the addresses; coordinator: as below."""
    coordinator: str = ''
    """host:port of process 0."""
    processes: PositiveInt = 1
    """Number of processes; mesh.replica must be a multiple."""
    process: NonNegativeInt = 0
    """Index of this process."""
    heartbeat: PositiveInt = 100
    """Seconds without a sign of life from a process after which the others stop."""


# ---- judges ----------------------------------------------------------------------------------------


class Judge(Section):
    """Verdicts where no string comparison decides."""

    kind: Literal['rule', 'policy', 'endpoint'] = 'rule'
    """rule (miniature worlds), policy (the initial weights), or endpoint (a server)."""
    url: str = 'http://127.0.0.1:8001/v1'
    """endpoint: an OpenAI-compatible server; its key is read from OPENAI_API_KEY."""
    model: str = 'judge'
    """endpoint: name of the model."""
    rubric_model: str = ''
    """endpoint: another model that writes rubrics; '' is `model`."""
    grade_model: str = ''
    """endpoint: another model that grades by rubrics; '' is `model`."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature."""
    tokens: PositiveInt = 512
    """Longest reply."""
    grade_tokens: NonNegativeInt = 0
    """Longest reply that grades an answer by a rubric; 0: `tokens`. A policy's also ends where its slot is full."""
    request: RequestFields = ''
    """endpoint: further fields of the request, a JSON object; null takes a field away. Servers of reasoning models want
    `{"max_completion_tokens": 4096, "temperature": null}`."""
    timeout: PositiveFloat = 60.0
    """endpoint: seconds per attempt."""
    retries: NonNegativeInt = 3
    """endpoint: further attempts."""
    # Higher than for searches: small judges often write replies that cannot be parsed.
    max_failure_rate: Fraction = 0.5
    """Share of judgements without a verdict in a step above which the run stops."""
    rubrics: RubricCount = (3, 5)
    """Fewest and most items of a rubric list."""
    at_once: PositiveInt = 64
    """`evaluate --workdir`: judgements in progress at the same time, of each judge."""
    prices: Prices = (0.0, 0.0)
    """endpoint: prices of a million prompt tokens and of a million reply tokens, for the estimate that
    `evaluate --workdir` prints; (0, 0): unknown."""


class SecondJudge(Section):
    """A second judge of `evaluate --workdir`, whose grades are compared with those of `judge`; timeout, retries and
    max_failure_rate are those of `judge`."""

    kind: Literal['none', 'rule', 'endpoint'] = 'none'
    """none, rule (miniature worlds), or endpoint (a server)."""
    url: str = 'http://127.0.0.1:8002/v1'
    """endpoint: an OpenAI-compatible server; its key is read from SECOND_JUDGE_API_KEY."""
    model: str = 'judge'
    """endpoint: name of the model."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature."""
    tokens: PositiveInt = 512
    """Longest reply."""
    request: RequestFields = ''
    """As judge.request."""
    prices: Prices = (0.0, 0.0)
    """As judge.prices."""


# ---- logs and traces -------------------------------------------------------------------------------


WRITERS = ('tensorboard', 'wandb', 'mlflow')


class Log(Section):
    """What a run prints on the terminal beside its progress bar, and where its metrics go."""

    samples_every: NonNegativeInt = 10
    """Steps between two printed rollouts (question, searches, answer, reward); 0: none."""
    writers: tuple[Literal['tensorboard', 'wandb', 'mlflow'], ...] = ('tensorboard',)
    """Where metrics go beside metrics.jsonl: tensorboard, wandb (Weights & Biases), mlflow. The last two have to be
    installed (pip install wandb, mlflow) and are set up by their own environment variables, such as WANDB_MODE=offline
    and MLFLOW_TRACKING_URI."""
    project: Annotated[str, requires(bool, 'give the name of a project')] = 'zeroplay_jax'
    """wandb, mlflow: project or experiment; the run is named after its workdir."""


class Profile(Section):
    """Traces of jax.profiler, in the folder profile/ of the workdir
    ([where the time goes](tpu-gpu.md#where-the-time-goes))."""

    steps: Annotated[
        tuple[int, ...],
        requires(lambda x: all(step >= 0 for step in x), 'give numbers of steps, such as (2, 3)'),
    ] = ()
    """Numbers of the steps that are traced; a step that compiles programs is not a typical one."""


# ---- the whole config ------------------------------------------------------------------------------


class Policy(Section):
    """Model and how it is computed."""

    path: str = ''
    """Hugging Face checkpoint folder, or the folder of an adapter, which is then added to its base; '' is the
    built-in tiny checkpoint."""
    adapters: Adapters = Adapters()
    dtype: Literal['float32', 'bfloat16'] = 'float32'
    """Dtype of activations (float32 on CPUs, bfloat16 on TPU and GPU)."""
    remat: bool = False
    """Recompute layers in the backward pass."""
    remat_policy: Literal['nothing_saveable', 'dots_with_no_batch_dims_saveable'] = (
        'nothing_saveable'
    )
    """What `remat` keeps: nothing, or the results of projections."""
    attention: Literal['dense', 'blocked', 'splash'] = 'dense'
    """Attention of packed rows: dense; blocked, whose memory is linear in micro.tokens; or splash, the TPU
    kernel (micro.tokens in steps of 128)."""
    scan: bool = False
    """Training runs the layers as a loop (lax.scan): compiles faster, holds the weights twice."""
    logit_chunk: PositiveInt = 1024
    """Tokens whose logits exist at the same time in scoring."""
    logits: Literal['all', 'trained'] = 'all'
    """Tokens whose logits an update computes: all, or those that the policy wrote. The gradients are equal
    up to the order of sums."""


class Tools(Section):
    """Tools of the policy and how it calls them (docs/tools.md)."""

    names: tuple[str, ...] = ('search',)
    """Tools: search, open, calculator, mcp, or package.module:attribute."""
    syntax: Literal['search_r1', 'r_search', 'qwen', 'olmo'] = 'search_r1'
    """search_r1: <search>…</search> in the text; r_search: the same with <observation> for results;
    qwen: <tool_call>{json}</tool_call>; olmo: <function_calls>search(query="…")</function_calls>."""
    top_k: PositiveInt = 3
    """search: passages per query."""
    max_queries: PositiveInt = 3
    """search: queries of one call that are run."""
    page_words: PositiveInt = 200
    """open: words per page of a document."""
    max_failure_rate: Fraction = 0.5
    """Share of failed or timed-out calls of one tool in a step above which the run stops."""
    mcp_servers: str = 'http://127.0.0.1:8000/mcp'
    """mcp: a JSON file with "mcpServers", as other MCP clients have, or the address of one server."""
    mcp_seconds: PositiveFloat = 60.0
    """mcp: time limit of a call, also with rollout.deterministic."""


class Retrieval(Section):
    """Corpus and index."""

    kind: Literal['world', 'folder', 'http'] = 'world'
    """world: miniature worlds, in process; folder: an index of retrieval.build; http: a search server."""
    path: str = ''
    """folder, http: the index folder; for http only its corpus is read, for documents to ask about, and recipes and
    evaluations that read none need no folder."""
    encoder: str = ''
    """folder: current folder of the text encoder; '' is its location when the index was built."""
    url: str = 'http://127.0.0.1:8000'
    """http: a server with Search-R1's protocol."""
    timeout: PositiveFloat = 30.0
    """http: seconds per attempt."""
    retries: NonNegativeInt = 4
    """http: further attempts."""
    ready_seconds: PositiveFloat = 600.0
    """http: how long to wait for the server at the start."""
    cache: NonNegativeInt = 100_000
    """Queries whose results are kept in memory."""
    max_failure_rate: Fraction = 0.1
    """Share of failed searches in a step above which the run stops."""
    overfetch: PositiveInt = 32
    """Candidates per query that are scored again exactly."""
    held_out: InputPath = ''
    """folder, http: JSON lines with the document_id and title of passages that training neither finds nor opens;
    evaluations do. '': training searches all passages."""


class World(Section):
    """The miniature world."""

    train: WorldSeeds = (0, 40)
    """Training worlds: (first seed, count)."""
    evaluation: WorldSeeds = (0, 12)
    """Held-out worlds: (first seed, count); training never sees or searches them."""
    near_misses: Fraction = 0.25
    """Share of entities that get a document with a near-miss title."""


class Schedule(Section):
    """Iterations and the distribution of hops."""

    iterations: PositiveInt = 3
    """Outer iterations: each has a proposer phase, a generation phase and a solver phase."""
    hop_ratio: HopRatio = (4, 3, 2, 1)
    """Shares of documents for 1-, 2-, 3- and 4-hop questions, exact in every batch."""
    initial_document: bool = True
    """Show the proposer its document (False: Dr. Zero's ablation)."""


class Inputs(Section):
    """External data. Which files a recipe takes is said in its documentation."""

    answers: InputPath = ''
    """JSON lines of answers to hide (SSP); '' takes those of the training worlds."""
    questions: InputPath = ''
    """JSON lines of questions with answers (DSPO); '' takes those of the training worlds."""
    documents: DocumentsFile = ''
    """JSON lines of documents with hops (Dr. Zero, π-Play, SCOPE); '' draws them from the corpus."""
    types: tuple[str, ...] = ('',)
    """Task types to take from `documents` ('planning', …); ('',): all."""
    tasks: InputPath = ''
    """JSON lines of open tasks with rubrics (SCOPE); '' lets the challenger write them."""
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
    """Proposer's reward for k of n solved: linear: (n−k)/(n−1) inside 0<k<n; parabolic: 4·p·(1−p);
    one_minus; triangle; solvable: 1 inside 0<k<n; or package.module:function."""
    answer: Annotated[str, one_of_or_function('em', 'subem', 'f1', 'judge')] = 'em'
    """Solver's reward for an answer: em, subem, f1, judge, or package.module:function."""
    overlong_buffer: NonNegativeInt = 0
    """Tokens before the end of a slot over which a rollout loses up to 1; 0: none."""
    target: OpenFraction = 0.5
    """triangle: mean score at which a task gets the highest reward."""
    format_weight: NonNegativeFloat = 0.5
    """Weight of the format score; 0: off."""


class Pool(Section):
    """Task generation: the questions that the solver trains on."""

    batch: PositiveInt = 256
    """Documents per generation step."""
    batches: NonNegativeInt = 0
    """Generation steps per iteration; 0: enough for new questions in every solver step."""
    samples: PositiveInt = 5
    """Proposals per document, of which one is kept: the best-formed (Dr. Zero) or the first in `window` (SCOPE)."""
    question_words: PositiveInt = 50
    """Longer questions are cut to this many words (Dr. Zero's code)."""
    window: Window = (0.0, 1.0)
    """Keep questions whose measured solve rate is inside (Dr. Zero, π-Play: needs measure > 0; SCOPE: mean score)."""
    measure: NonNegativeInt = 0
    """Solver rollouts per generated question before it enters the pool; 0: none (SCOPE: reward.solves)."""
    target: NonNegativeInt = 0
    """Generation ends when the pool has this many questions, after at most `batches` steps; 0: all steps are run.
    With fewer questions than the solver phase needs, the solver trains on them again."""


class Privileged(Section):
    """What the distillation teacher sees."""

    kind: Literal['none', 'answer', 'answer_hop', 'qcp_partial', 'qcp'] = 'qcp'
    """Nothing, the answer, answer and hop count, half or all of the question construction path."""
    prompt_tokens: PositiveInt = 256
    """Longest teacher prompt; found passages are cut to their titles until it fits."""
    tokens: PositiveInt = 768
    """Length of a packed teacher row."""


class MicroBatch(Section):
    """One packed micro-batch of the learner."""

    rows: PositiveInt = 8
    """Packed rows."""
    tokens: PositiveInt = 512
    """Tokens per packed row."""
    order: Literal['arrival', 'longest_first'] = 'arrival'
    """Order in which rollouts are packed; longest_first needs fewer rows."""
    weights: Literal['masters', 'published'] = 'masters'
    """What a micro-batch reads: the float32 masters, gathered every time (least memory), or the weights
    of the sampler, gathered over replicas once per update."""


class Evaluation(Section):
    """Held-out evaluation inside a run."""

    every: NonNegativeInt = 0
    """Steps of the evaluated role between evaluations; 0: only at the start and the end."""
    questions: PositiveInt = 100
    """Questions per hop count on the miniature worlds; from a file, in all (a fixed random sample)."""
    file: InputPath = ''
    """JSON lines of questions with answers, for any corpus but the miniature worlds."""
    tasks: InputPath = ''
    """JSON lines of open tasks with rubrics; SCOPE makes its own from the miniature worlds."""
    metric: Annotated[str, one_of_or_function('none', 'subem', 'f1', 'judge')] = 'none'
    """Further score of the answers, beside exact match: none, subem, f1, judge, or package.module:function."""
    hops: Hops = (1, 2, 3, 4)
    """Hop counts to evaluate, on the miniature worlds."""


class Checkpoint(Section):
    """Checkpoints of a run."""

    every: PositiveInt = 1
    """Steps between checkpoints."""
    keep: PositiveInt = 2
    """Checkpoints to keep."""
    best: Annotated[
        str,
        requires(
            lambda x: not x or x.startswith(('em/', 'rubrics/')),
            'give a metric of evaluations such as em/mean, em/hop1 or rubrics/mean',
        ),
    ] = ''
    """Metric of evaluations, such as em/mean: the checkpoint with its largest value is kept as well, in the folder
    best of the workdir; '': none."""


class Compilation(Section):
    """Compiled programs that are kept between processes."""

    cache: Annotated[
        str,
        requires(
            lambda x: '://' not in x and not pathlib.Path(x).is_file(),
            'name a folder, which is created if it is missing',
        ),
    ] = ''
    """Folder of the cache, which runs may share; every step then logs how many programs came from it. '' leaves
    JAX's own setting (JAX_COMPILATION_CACHE_DIR)."""
    gigabytes: NonNegativeFloat = 0.0
    """Size above which programs that were not used for longest are removed; 0: no limit."""


class TrainedRole(Section):
    """One trained role: optimiser, batch, advantages and loss."""

    learning_rate: PositiveFloat = 1e-6
    """Peak; constant after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Length n of the linear warm-up: update i has i/n of the rate."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW, matrices only."""
    beta1: BelowOne = 0.9
    """AdamW."""
    beta2: BelowOne = 0.999
    """AdamW."""
    clip_norm: PositiveFloat = 1.0
    """Global gradient norm."""
    steps: NonNegativeInt = 50
    """Training steps per phase."""
    batch: PositiveInt = 256
    """Episodes (documents or questions) per step."""
    samples: PositiveInt = 1
    """Rollouts per prompt that are trained on."""
    prompt_tokens: NonNegativeInt = 0
    """Longest prompt of this role; 0: rollout.prompt_tokens."""
    # No top-p or top-k: the loss could not correct for the tokens that they exclude.
    temperature: PositiveFloat = 1.0
    """Of training rollouts; log-probs are those of the scaled softmax."""
    baseline: Literal['mean', 'loo', 'value', 'none'] = 'mean'
    """Subtracted from a reward: mean of its group, mean of the other rows of the group (RLOO), or the prediction of a
    value network for every token (PPO; section value_network)."""
    scale: Literal['std', 'batch', 'none'] = 'std'
    """Divisor of advantages: deviation of the group, or of the batch's tokens (REINFORCE++-baseline, PPO)."""
    std_ddof: Annotated[int, requires(lambda x: x in (0, 1), 'give one of 0, 1')] = 1
    """1: sample deviation (verl, torch); 0: population."""
    singleton: Literal['zero', 'raw'] = 'zero'
    """Advantage of a row that is alone in its group (Dr. Zero's code: raw)."""
    skip_uninformative: bool = True
    """Leave out rows of advantage 0, which contribute nothing without a KL or entropy term or a value network."""
    loss: Annotated[str, one_of_or_function(*BUILT_IN_LOSSES)] = 'token_pg'
    """Policy loss: reinforce (no ratio), token_pg (PPO, GRPO), sequence_pg (GSPO, DSPO), geometric_pg
    (GMPO), cispo, or package.module:function."""
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
    """Mean over tokens, over sequences, or a sum over a constant (Dr. GRPO)."""
    constant_norm: PositiveFloat = 1.0
    """constant: tokens that a rollout's sum is divided by."""
    kl_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL to the initial weights; 0: no reference policy is kept."""
    kl_kind: Literal['k1', 'k2', 'k3', 'k1+', 'k3+'] = 'k3'
    """KL estimator; k1+ and k3+ have that value with the gradient of k2."""
    entropy_coef: NonNegativeFloat = 0.0
    """Entropy bonus coefficient."""
    minibatches: PositiveInt = 1
    """Optimiser steps per rollout batch; with 1 the importance ratio is identically 1."""
    old_logp: Literal['sampler', 'trainer'] = 'sampler'
    """Denominator of the ratio: the sampler's log-probs, or the trainer's before the first update."""
    tis_cap: NonNegativeFloat = 0.0
    """Cap of the importance weight trainer/sampler (truncated importance sampling); 0: none."""
    tis_level: Literal['token', 'sequence'] = 'token'
    """Level of that weight."""
    filter_groups: bool = False
    """Dynamic filter: train on groups with reward variance only, sampling until the batch is full."""
    fill_rounds: PositiveInt = 4
    """Sampling rounds per step with the filter, the first one included; then the batch stays short."""
    surplus: Literal['carry', 'drop'] = 'carry'
    """Groups beyond a full batch: carried over to the next step, or dropped."""
    train_iterations: Annotated[int, Field(ge=-1)] = -1
    """Iterations in which the role is trained; -1: all, 0: none."""
    distill_top_k: NonNegativeInt = 0
    """Tokens on which the teacher's distribution is matched, plus one tail outcome; 0: no teacher."""
    distill_coef: DistillCoefficients = (0.0,)
    """Distillation coefficient per iteration; the last one stays."""
    # π-Play's text leaves the direction open; reverse is that of the work it cites (SDPO).
    distill_kind: Literal['reverse', 'forward', 'jsd'] = 'reverse'
    """Divergence: reverse is KL(student ‖ teacher)."""
    distill_tail: bool = True
    """Keep the probability of all other tokens as one outcome."""
    distill_ema_rate: Fraction = 0.05
    """Share of the student that the EMA teacher takes over after every batch."""
    adapter: InputPath = ''
    """Adapter folder (PEFT) that the role starts from; needs policy.adapters.rank."""


class ValueNetwork(Section):
    """The value networks of roles with baseline=value (PPO): learning rate, loss and advantages. Warm-up, AdamW and
    gradient norm are those of the role. They read float32 masters, whatever micro.weights is."""

    learning_rate: NonNegativeFloat = 0.0
    """Peak; constant after the warm-up. 0: ten times that of the role's policy, as in Search-R1."""
    value_clip: NonNegativeFloat = 0.5
    """Distance that a value may move from that before the updates of a step; 0: no limit."""
    discount: Fraction = 1.0
    """γ of the advantages, per trained token."""
    gae_lambda: Fraction = 1.0
    """λ of the advantages (GAE): 1: reward minus value."""


class Run(Section):
    """A run. Sections of recipes and of trained roles come in addition."""

    recipe: str = 'drzero'
    """A module of zeroplay_jax/recipes, or package.module of a recipe of your own."""
    seed: NonNegativeInt = 0
    """The whole run is a function of the config and this number."""
    progress: bool = True
    """Progress bars, if the terminal is one, and printed rollouts (log.samples_every)."""
    stop_after_empty_steps: NonNegativeInt = 2
    """Consecutive training steps of a policy that train nothing, after which the run stops with exit
    status 3 (at once if a step has no tasks); 0: never."""
    policy: Policy = Policy()
    mesh: Mesh = Mesh()
    cpu_devices: PositiveInt = 1
    """JAX devices that a CPU is divided into. With one per core and mesh.replica=-1, small models run faster than
    with one device on all cores. A number in XLA_FLAGS has priority."""
    offload: bool = False
    """Keep learner state in host memory except during its update; free the KV cache meanwhile."""
    distributed: Distributed = Distributed()
    sampler: Sampler = Sampler()
    rollout: Rollout = Rollout()
    tools: Tools = Tools()
    weights: Literal['separate', 'shared'] = 'separate'
    """Whether the trained roles are separate policies or one."""
    shared_optimizer: bool = False
    """With shared weights: one set of optimiser moments for all roles."""
    prompts: Literal['mini', 'paper'] = 'mini'
    """Prompt set: the short form of the built-in checkpoint, or full instructions."""
    retrieval: Retrieval = Retrieval()
    world: World = World()
    schedule: Schedule = Schedule()
    inputs: Inputs = Inputs()
    reward: Reward = Reward()
    pool: Pool = Pool()
    privileged: Privileged = Privileged()
    judge: Judge = Judge()
    second_judge: SecondJudge = SecondJudge()
    micro: MicroBatch = MicroBatch()
    value_network: ValueNetwork = ValueNetwork()
    eval: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    bucket: Bucket = Bucket()
    compilation: Compilation = Compilation()
    log: Log = Log()
    profile: Profile = Profile()
    alarms: Alarms = Alarms()
    log_trajectories: NonNegativeInt = 16
    """Approximate number of rollouts per step that are logged for the report: whole questions."""
