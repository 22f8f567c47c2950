"""The ablation rows of the five papers, and baselines that are only settings, by name.

    zeroplay train --config=configs/ablations.py:drzero/grpo --workdir=runs/grpo
    zeroplay train --config=configs/ablations.py:drzero/grpo:mini --workdir=runs/grpo_mini

A name is SYSTEM/ROW; `:mini` behind it shrinks the system as configs/SYSTEM.py:mini does. Every row below says which
fields differ from zeroplay_jax.configs/SYSTEM.py, and where it comes from.
"""

import importlib

from zeroplay_jax.configs.scope import TYPES
from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.settings.kinds import EXAMPLE_TASKS

# Settings of a role by estimator, see `_of`. GRPO has the KL term and mini-batches of the solver (SSP eq. 4, table 4).
_GRPO = {
    'baseline': 'mean',
    'scale': 'none',
    'samples': 5,
    'loss': 'token_pg',
    'aggregation': 'seq_mean_token_mean',
    'kl_coef': 0.01,
    'minibatches': 2,
}
_REINFORCE = {'baseline': 'none', 'scale': 'none', 'samples': 1, 'loss': 'reinforce'}
# Mean over rollouts of the sum over tokens: the proposer's loss of SSP, in one update and without a KL term, and the
# losses of Dr. Zero (eqs. 2 and 5), π-Play (eq. 5) and SCOPE (eq. 3).
_SUM_OF_SSP = {'aggregation': 'seq_mean_token_sum', 'minibatches': 1, 'kl_coef': 0.0}
_SUM = {f'{role}.aggregation': 'seq_mean_token_sum' for role in ('proposer', 'solver')}
# What the rows of SQLM and R-Zero have in common: questions without a document, in groups of a prompt, labelled by the
# solver's majority, and no reward for form. (A question without its form is not asked, and earns nothing.)
_MAJORITY = {
    'drzero.labels': 'majority',
    'drzero.group': 'prompt',
    'proposer.samples': 4,
    'schedule.initial_document': False,
    'reward.format_weight': 0.0,
}
# One policy in both roles, because the paper says of R-Zero and Dr. Zero alone that they have two.
_SQLM = {**_MAJORITY, 'reward.difficulty': 'solvable', 'weights': 'shared'}
# A ratio per token and a mean over tokens, as in DAPO, and what Search-R1 changes of it.
_TOKEN_RATIO = {'loss': 'token_pg', 'aggregation': 'token', 'clip_low': 0.2}
_SEARCH_R1 = _TOKEN_RATIO | {'filter_groups': False, 'clip_high': 0.2, 'kl_coef': 0.001}
_PPO = {'baseline': 'value', 'scale': 'batch', 'samples': 1, 'minibatches': 2}
_FROM_MEMORY = '''
[solver]
user = """
Think about the question inside <think> and </think>, then give only the short answer between <answer> and </answer>.

Question: {question}"""
'''
# All documents of four other trajectories.
_NOISE_OF_CODE = {'ssp.noise_unit': 'trajectory'}
_JUDGE_CHECKER = {'ssp.checker': 'judge', 'judge.kind': 'endpoint'}
# Lengths for models that think, in slots as long as π-Play's student (table 6).
_LONG = {
    'rollout.turn_tokens': 1024,
    'sampler.context': 8192,
    'micro.tokens': 8192,
    'privileged.tokens': 12288,
}
# Qwen3-8B with its own call syntax; thoughts are cut after their turn.
_QWEN3 = {
    'policy.path': 'checkpoints/Qwen3-8B',
    'tools.syntax': 'qwen',
    'rollout.drop_thinking': True,
}
# SSP's table 5 and figure 5 have the model before its instruction tuning.
_BASE_MODEL = {'policy.path': 'checkpoints/Qwen2.5-7B'}


def _of(role, settings):
    """Returns the settings of a role as dotted fields of the config."""
    return {f'{role}.{name}': value for name, value in settings.items()}


def _elsewhere(model, **of_solver):
    """Returns the settings of Search-R1's script where Dr. Zero and π-Play compare with it.

    They have their own model and search engine, and exact match; its steps are many more than their 150.
    """
    script = {'samples': 5, 'batch': 512, 'minibatches': 2, 'steps': 1005}
    return {
        **_of('solver', _SEARCH_R1 | script | of_solver),
        'policy.path': f'checkpoints/{model}',
        'retrieval.path': 'indexes/wiki18_e5',
        'reward.answer': 'em',
        'eval.metric': 'none',
    }


def _judge(**models):
    """Returns the settings of a run of Qwen3-8B with a served judge; `models`: fields of config.judge that differ.

    It begins after an iteration of scope/qwen3_8b and trains the solver alone (`recipes/README.md`).
    """
    return {
        **_QWEN3,
        'schedule.iterations': 1,
        'proposer.train_iterations': 0,
        'judge.kind': 'endpoint',
        'judge.model': 'Qwen3-8B',
        'judge.timeout': 600.0,
        **_of('judge', models),
    }


ROWS = {
    # SSP: role ablation, estimators (proposer–solver), batch strategies, answerability check, penalty, released code.
    'ssp/solver_only': {
        'proposer.train_iterations': 0,
        'weights': 'separate',
    },  # the proposer stays as it was
    # Weights stay shared: the paper's "fixed" solver changes, too, by what the proposer learns (figure 3, table 2).
    'ssp/proposer_only': {'solver.train_iterations': 0},
    'ssp/reinforce_reinforce': _of('solver', _REINFORCE | _SUM_OF_SSP),
    'ssp/grpo_reinforce': _of('proposer', _GRPO) | _of('solver', _REINFORCE | _SUM_OF_SSP),
    'ssp/grpo_grpo': _of('proposer', _GRPO),
    # Compared with ssp/base_model, which forgets earlier questions every ten steps.
    'ssp/base_model': _BASE_MODEL,
    'ssp/dummy_padding': {**_BASE_MODEL, 'ssp.fill': 'pad'},
    # Until the batch is full; the rounds are limited because a policy may make no valid question.
    'ssp/dynamic_resampling': {**_BASE_MODEL, 'ssp.fill': 'resample', 'ssp.fill_rounds': 50},
    'ssp/replay_full': {**_BASE_MODEL, 'ssp.fill': 'replay_full'},
    'ssp/no_check': {'ssp.answerability_check': False},
    # The config has four single documents.
    'ssp/noise_0': {'ssp.noise': 0},
    'ssp/noise_1': {'ssp.noise': 1},
    'ssp/noise_7': {'ssp.noise': 7},
    'ssp/noise_trajectories': _NOISE_OF_CODE,
    'ssp/penalty': {'ssp.invalid_reward': -0.1, 'ssp.fill': 'replay_full'},
    'ssp/code': {
        'ssp.first_update': 'proposer',
        'ssp.code_gate': True,
        'ssp.strict_format': False,
        **_NOISE_OF_CODE,
        **_JUDGE_CHECKER,
        'solver.scale': 'std',
        'solver.aggregation': 'token',
        'proposer.loss': 'token_pg',
        'proposer.aggregation': 'token',
        'proposer.kl_coef': 0.01,
        'proposer.clip_low': 0.2,
        'proposer.clip_high': 0.285,
        'shared_optimizer': True,
    },
    # The code asks a server in the answerability check, algorithm 1 the policy.
    'ssp/judge_checker': _JUDGE_CHECKER,
    # The start from R-Search's checkpoint, which also writes <original_evidence>: its prompt (appendix D) goes into
    # config.prompts. From the other instruction-tuned starts policy.path alone changes; Qwen3 thinks, and searches with
    # the tags of the others (appendix D).
    'ssp/r_search': {
        'policy.path': 'checkpoints/R-Search-7b-grpo',
        'tools.syntax': 'r_search',
    },
    'ssp/qwen3_8b': {**_QWEN3, 'tools.syntax': 'search_r1'},
    # Dr. Zero: hop ratio, estimator; table 7, whose rows have one iteration and are compared with 'iterations_1';
    # iterations, baselines, released code.
    'drzero/hops_1111': {'schedule.hop_ratio': (1, 1, 1, 1)},
    'drzero/hops_2111': {'schedule.hop_ratio': (2, 1, 1, 1)},
    'drzero/grpo': {'drzero.group': 'prompt', 'proposer.samples': 4, 'reward.solves': 4},
    'drzero/steps_100': {'proposer.steps': 100, 'solver.steps': 100, 'schedule.iterations': 1},
    'drzero/no_format': {'reward.format_weight': 0.0, 'schedule.iterations': 1},
    'drzero/parabolic': {'reward.difficulty': 'parabolic', 'schedule.iterations': 1},
    'drzero/no_document': {'schedule.initial_document': False, 'schedule.iterations': 1},
    'drzero/iterations_1': {'schedule.iterations': 1},
    'drzero/iterations_2': {'schedule.iterations': 2},
    # The baselines SQLM* and R-Zero* of table 2, as read here: recipes/README.md says what is and what is not theirs.
    'drzero/sqlm': _SQLM,
    # 10 answers per question, trained on where 3 to 7 agree.
    'drzero/r_zero': {
        **_MAJORITY,
        'reward.difficulty': 'triangle',
        'reward.solves': 10,
        'pool.measure': 10,
        'pool.window': (0.3, 0.7),
    },
    'drzero/sum_over_tokens': _SUM,
    'drzero/code': {
        'proposer.singleton': 'raw',
        'solver.singleton': 'raw',
        'drzero.separate_format': False,
    },
    # π-Play: SQLM* with its model; what the teacher sees, the weight of distillation (alpha_qwen3: that of Qwen3-4B and
    # Qwen3-8B; 0.0 is no_distillation), K, direction (SDPO's code: jsd), teacher's rate.
    'piplay/sqlm': {**_SQLM, 'solver.distill_top_k': 0},
    'piplay/privileged_none': {'privileged.kind': 'none'},
    'piplay/privileged_answer': {'privileged.kind': 'answer'},
    'piplay/privileged_answer_hop': {'privileged.kind': 'answer_hop'},
    'piplay/privileged_half': {'privileged.kind': 'qcp_partial'},
    'piplay/no_distillation': {'solver.distill_top_k': 0},
    **{f'piplay/alpha_{a}': {'solver.distill_coef': (a,)} for a in (0.1, 0.05, 0.03, 0.01, 0.005)},
    'piplay/alpha_qwen3': {
        'solver.distill_coef': (0.03, 0.003, 0.002),
        **_QWEN3,
        **_LONG,
        'policy.path': 'checkpoints/Qwen3-4B',
    },
    **{f'piplay/top_{k}': {'solver.distill_top_k': k} for k in (25, 50, 100, 200)},
    'piplay/jsd': {'solver.distill_kind': 'jsd'},
    'piplay/fixed_teacher': {'solver.distill_ema_rate': 0.0},
    'piplay/sum_over_tokens': _SUM,
    'piplay/student_8192': _LONG,
    'piplay/iterations_1': {'schedule.iterations': 1},
    'piplay/iterations_2': {'schedule.iterations': 2},
    # DSPO: without its filter it is GSPO, with a token ratio DAPO; Search-R1's GRPO and PPO have neither, and are
    # trained with DSPO's reward, as in the paper. PPO has the single rollout per question of Search-R1's script, whose
    # rates are the defaults.
    'dspo/gspo': {'solver.filter_groups': False},
    'dspo/dapo': _of('solver', _TOKEN_RATIO | {'kl_coef': 0.0, 'clip_high': 0.28}),
    'dspo/search_r1_grpo': _of('solver', _SEARCH_R1),
    'dspo/search_r1_ppo': {
        **_of('solver', _SEARCH_R1 | _PPO),
        'solver.batch': 512,
    },
    # In table 1 of Dr. Zero and in π-Play's main table; which estimator it has there is not said.
    'dspo/search_r1_drzero': _elsewhere('Qwen2.5-3B-Instruct', **_PPO),
    'dspo/search_r1_piplay': _elsewhere('Qwen3-4B-Instruct-2507'),
    # R1, without search (Dr. Zero, table 1). That table's supervised fine-tuning is no part of this package.
    'dspo/r1_grpo': {
        **_elsewhere('Qwen2.5-3B-Instruct'),
        'tools.names': (),
        'prompts': _FROM_MEMORY,
    },
    'dspo/gmpo': _of('solver', {'loss': 'geometric_pg', 'clip_low': 0.4, 'clip_high': 0.4}),
    'dspo/dense': {
        'retrieval.path': 'indexes/wiki18_e5'
    },  # in place of BM25; the size of the model is policy.path
    'dspo/drop_surplus': {'solver.surplus': 'drop'},
    'dspo/exact_match': {'reward.answer': 'em'},
    # SCOPE: gates, length factor, frozen challenger, iterations, types of task, window, released code. The paper's
    # ablations are of Qwen3-8B, which is its own judge there.
    'scope/qwen3_8b': _QWEN3,
    'scope/no_gates': {**_QWEN3, 'scope.gates': False},
    # Tasks about the passages found pass the gate, and rubrics come from these, too.
    'scope/relevant_to_evidence': {'scope.relevant_to': 'evidence'},
    'scope/no_length_factor': {**_QWEN3, 'scope.length_factor': False},
    'scope/frozen_challenger': {**_QWEN3, 'proposer.train_iterations': 1},
    **{f'scope/iterations_{n}': {**_QWEN3, 'schedule.iterations': n} for n in (4, 5, 6)},
    **{
        f'scope/without_{kind}': {**_QWEN3, 'inputs.types': tuple(k for k in TYPES if k != kind)}
        for kind in TYPES
    },
    'scope/olmo': {'policy.path': 'checkpoints/OLMo-3-7B-Instruct', 'tools.syntax': 'olmo'},
    # GRPO on given tasks and rubrics, with as many steps of the solver.
    'scope/given_tasks': {'inputs.tasks': 'data/tasks.jsonl'},
    # Sizes of the judge (figure 4), compared with the second iteration of scope/qwen3_8b.
    'scope/grader_4b': _judge(grade_model='Qwen3-4B'),
    'scope/grader_32b': _judge(grade_model='Qwen3-32B'),
    'scope/rubric_writer_4b': _judge(rubric_model='Qwen3-4B'),
    'scope/rubric_writer_32b': _judge(rubric_model='Qwen3-32B'),
    'scope/per_turn': {'rollout.drop_thinking': True},
    'scope/no_window': {'pool.window': (0.0, 1.0)},
    'scope/sum_over_tokens': _SUM,
    # Appendix G has no limit of the batches; these are 250,000 documents in an iteration.
    'scope/until_full': {'pool.batches': 1000},
    'scope/code': {
        'scope.code_format': True,
        'solver.clip_high': 0.28,
        'judge.rubrics': (3, 10),
    },
}


def get_config(name=''):
    """Returns the config of a row, such as 'drzero/grpo' or 'drzero/grpo:mini'."""
    row, _, variant = name.partition(':')
    if row not in ROWS:
        system = row.split('/')[0] + '/'
        choices = [name for name in ROWS if name.startswith(system)] or list(ROWS)
        raise ValueError(
            f'no ablation {row!r}{did_you_mean(row, choices)}; there are {", ".join(choices)}'
        )
    config = importlib.import_module(f'zeroplay_jax.configs.{row.split("/")[0]}').get_config(
        variant
    )
    settings = ROWS[row]
    if variant:
        settings = of_small_run(row)
    config.update_from_flattened_dict(settings)
    return config


def of_small_run(row):
    """Returns the settings of a row without its model and files: a small run has a policy and tasks of its own."""
    settings = dict(ROWS[row])
    of_model = {'policy.path', 'tools.syntax', 'prompts'}
    if 'policy.path' in settings:
        of_model |= {'rollout.drop_thinking', *_LONG}
    if 'inputs.tasks' in settings:
        settings['inputs.tasks'] = str(EXAMPLE_TASKS)
    return {
        field: value
        for field, value in settings.items()
        if field not in of_model and not field.endswith(('.batch', '.steps'))
    }
