"""Options of JAX, of the environment or of a notebook: a run gives the same numbers, or is refused in one line."""

import jax
import numpy as np
import pytest
import tiny

import zeroplay_jax as zp
from zeroplay_jax.policy import sharding
from zeroplay_jax.retrieval.corpus import MemoryCorpus
from zeroplay_jax.retrieval.encoder import TextEncoder
from zeroplay_jax.retrieval.index import ExactIndex
from zeroplay_jax.retrieval.lexical import LexicalEncoder
from zeroplay_jax.rollout import slot_state
from zeroplay_jax.types import UserError

# Option → a value under which dtypes, noise or products differ, or programs do not trace.
REFUSED = {
    'jax_default_matmul_precision': 'bfloat16',
    'jax_enable_x64': True,
    'jax_numpy_dtype_promotion': 'strict',
    'jax_numpy_rank_promotion': 'raise',
    'jax_threefry_partitionable': False,
}
# Option → a value under which noise is the same because it names its generator.
NOISE = {
    'jax_default_prng_impl': ('rbg', 'unsafe_rbg'),
    'jax_enable_custom_prng': (True,),
    'jax_high_dynamic_range_gumbel': (True,),
    'jax_legacy_prng_key': ('error',),
    'jax_random_seed_offset': (7,),
}
# The others: types and derivatives that no run uses, where devices, programs and messages are, how programs are
# compiled, as XLA_FLAGS, and checks that raise.
OTHERS = """
    allow_f16_reductions explicit_x64_dtypes softmax_custom_jvp use_direct_linearize
    backend_target array_garbage_collection_guard auto_pcast bcoo_cusparse_lowering captured_constants_report_frames
    captured_constants_warn_bytes check_proxy_envs check_static_indices check_tracer_leaks
    compilation_cache_check_contents compilation_cache_dir compilation_cache_expect_pgle
    compilation_cache_include_metadata_in_key compilation_cache_max_size compiler_detailed_logging_min_ops
    compiler_enable_remat_pass custom_vjp3 cpu_collectives_implementation cpu_enable_async_dispatch
    cpu_get_global_topology_timeout_minutes cpu_get_local_topology_timeout_minutes cross_host_transfer_socket_address
    cross_host_transfer_timeout_seconds cross_host_transfer_transfer_size cross_host_transport_addresses
    cuda_visible_devices debug_infs debug_key_reuse debug_leaked_clients_on_clear_backends debug_log_modules debug_nans
    default_device disable_bwd_checks disable_jit disable_most_optimizations disable_vmap_shmap_error
    disallow_mesh_context_manager distributed_debug dump_ir_modes dump_ir_to embedded_constants_max_bytes enable_checks
    enable_compilation_cache enable_pgle enable_preemption_service enable_recoverability
    error_checking_behavior_divide error_checking_behavior_nan error_checking_behavior_oob
    exec_time_optimization_effort experimental_unsafe_xla_runtime_errors explain_cache_misses
    export_calling_convention_version export_ignore_forward_compatibility force_dcn_cross_host_transfers
    hlo_source_file_canonicalization_regex include_debug_info_in_dumps include_full_tracebacks_in_locations
    log_checkpoint_residuals log_compiles logging_level memory_fitting_effort memory_fitting_level mock_gpu_topology
    mosaic_allow_hlo mutable_array_checks no_execution no_tracing num_cpu_devices oneapi_visible_devices
    optimization_level pallas_enable_debug_checks pallas_poison_buffers pallas_use_mosaic_gpu pallas_verbose_errors
    persistent_cache_enable_xla_caches persistent_cache_min_compile_time_secs persistent_cache_min_entry_size_bytes
    pgle_aggregation_percentile pgle_profiling_runs pjrt_client_create_options platform_name platforms pprint_use_color
    ragged_dot_use_gpu_pallas_triton_lowering ragged_dot_use_ragged_dot_instruction raise_persistent_cache_errors
    refs_to_pins remove_custom_partitioning_ptr_from_cache_key remove_size_one_mesh_axis_from_type rocm_visible_devices
    send_traceback_to_runtime serialization_version share_binary_between_hosts share_binary_between_hosts_timeout_ms
    sort_devices_by_process_index source_url_schema thread_guard threefry_gpu_kernel_lowering traceback_filtering
    traceback_in_locations_limit tracer_error_num_traceback_frames transfer_guard transfer_guard_device_to_device
    transfer_guard_device_to_host transfer_guard_host_to_device remat3 scan3 use_emit_pipeline_primitive use_magma
    use_shardy_partitioner use_simplified_jaxpr_constants xla_backend xla_profile_version
""".split()


@pytest.fixture
def option():
    """A function that sets an option for the test."""
    before = {}

    def change(name, value):
        before.setdefault(name, getattr(jax.config, name))
        jax.config.update(name, value)

    yield change
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.skipif(jax.__version__ != '0.10.2', reason='other versions have other options')
def test_every_option_of_jax_is_decided():
    decided = {*REFUSED, *NOISE, *(f'jax_{name}' for name in OTHERS)}
    options = {name for name in jax.config.values if name.startswith('jax_')}
    assert options - decided == set(), (
        'does it change types, noise or products? (retrieval/jax_options.py)'
    )


@pytest.mark.fault('nov29-B7', 'options of JAX that change types, noise or products')
@pytest.mark.parametrize('name', REFUSED)
def test_an_option_that_changes_numbers_is_refused(option, name):
    option(name, REFUSED[name])
    with pytest.raises(
        UserError,
        match=f'^{name}={REFUSED[name]}: .*unset {name.upper()}, or call jax.config.update',
    ):
        sharding.make_mesh()


@pytest.mark.fault('nov29-B7', 'the same where an index is built')
def test_an_option_that_changes_vectors_is_refused(option):
    option('jax_numpy_dtype_promotion', 'strict')
    index = ExactIndex(LexicalEncoder(64), MemoryCorpus(['a'], ['b']), np.ones((1, 64), np.float32))
    with pytest.raises(UserError, match='^jax_numpy_dtype_promotion=strict: '):
        index.search(['a'], 1)
    with pytest.raises(UserError, match='^jax_numpy_dtype_promotion=strict: '):
        TextEncoder('no folder')


def test_an_option_that_a_notebook_sets_later_is_refused(tmp_path):
    policy = zp.load_policy(tiny.make_folder(tmp_path / 'policy'), zp.config('drzero', 'mini'))
    with jax.enable_x64(True), pytest.raises(UserError, match='^jax_enable_x64=True: '):
        zp.policy_loss(policy, [], [])


def tokens_of_noise():
    """Tokens of equal logits: they are those with the largest noise."""
    rows = 16
    key = np.arange(2 * rows, dtype=np.uint32).reshape(rows, 2)
    logits = np.zeros((rows, 97), np.float32)
    # A new function: JAX traces it again, whatever is in the keys of its cache.
    sample = jax.jit(lambda *arrays: slot_state.sample(*arrays))
    token, _ = sample(logits, np.ones(rows, np.float32), key, np.arange(rows))
    return token.tolist()


@pytest.mark.fault('nov29-B7', 'another default generator of random numbers, such as rbg')
@pytest.mark.parametrize(('name', 'value'), [(n, v) for n, vs in NOISE.items() for v in vs])
def test_options_of_noise_change_no_token(option, name, value):
    expected = tokens_of_noise()
    assert len(set(expected)) > 8
    option(name, value)
    assert tokens_of_noise() == expected
