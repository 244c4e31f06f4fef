"""Names that the released implementation's metrics have, by group, typed from its description; braces as in docs/metrics.md."""

from collections.abc import Iterable, Mapping

from tests.telemetry.test_documented import expand

MAIN = ("main_chain", "main_chain_original", "main_chain_synthetic")
OF_ROWS = "critic/<p>/{rewards,advantages}/{mean,max,min} {response_length,prompt_length,sequence_length}/<p>/{mean,max,min} "
OF_ROWS += "sequence_length/<p>/clip_ratio num_turns/<p>/{min,max,mean}"
SEQLEN = "{min,max,minmax_diff,balanced_min,balanced_max,mean}"
STREAM = "{pg_loss,pg_clipfrac,ppo_kl,pg_clipfrac_lower,mb_tokens,mb_samples,entropy}"
BUCKET = "{pairs,root_response_success_rate,prefix_response_success_rate,prefix_minus_root_response_success,"
BUCKET += "prefix_any_success_rate,prefix_better_frac}"


def of_stream(*streams: str) -> str:
    return " ".join(OF_ROWS.replace("<p>", stream) for stream in streams)


GROUPS = {
    # Of every step that trains
    "actor": "actor/{total_loss,mixed_token_loss,pg_loss,pg_clipfrac,ppo_kl,pg_clipfrac_lower,kl_coef,grad_norm,lr,"
    "lr_scheduler_step,total_mini_batch_steps,steps_with_main,steps_with_branch,steps_with_teacher,optimizer_steps} "
    f"actor/main_chain/{STREAM}",
    "kl": "actor/kl_loss",
    "data": of_stream("main_chain", "main_chain_original") + f" main_seqlen/{SEQLEN} "
    "data/{main,branch,teacher}_chain/filtered_count data/{main,branch,teacher}_chain_count",
    "states": of_stream("main_chain_synthetic"),
    "time": "timing_s/{step,gen,old_log_prob,ref,update_actor} timing_s/agent_loop/generate_main_chain/{min,max,mean} "
    "timing_s/agent_loop/slowest/{prompt_length,response_length} timing_s/one_stage/main_chain_wall "
    "perf/cpu_memory_used_gb training/{global_step,epoch,all_chains_empty_skip}",
    "validation": "timing_s/testing",
    "checkpoint": "timing_s/save_checkpoint",  # of the step before
    "rollout_dump": "timing_s/dump_rollout_generations",
    "accelerator": "perf/{mfu/actor,max_memory_allocated_gb,max_memory_reserved_gb}",  # what a CPU does not tell
    # Teacher tokens
    "teacher_tokens": of_stream("teacher_chain") + f" teacher_seqlen/{SEQLEN} "
    "actor/teacher_chain/{mean_logp,mb_tokens,mb_samples,entropy}",
    "luffy": "actor/teacher_chain/{luffy_loss,mean_shaping_weight}",
    "snis": "actor/teacher_chain/{snis_loss,snis_weight_mean}",
    "sft_joint": "actor/teacher_chain/sft_loss",
    "auto_coef": "actor/teacher_chain/auto_coef",
    "post_sft": "actor/post_sft_optimizer_steps actor/teacher_chain/{post_sft_loss,post_sft_grad_norm,post_sft_lr}",
    "attached": "prefix_luffy/{enabled,candidate_groups,teacher_rows_built,missing_suffix_skipped,missing_reward_skipped,"
    "low_reward_teacher_skipped,teacher_not_better_skipped,no_student_rows_skipped,equal_reward_groups_skipped,"
    "zero_teacher_advantage_skipped,student_rows_reweighted,mixed_token_count,teacher_token_fraction,teacher_tail_filtered,"
    "snis_weight_mean,snis_weight_max,len_ratio,teacher_reward_mean,student_reward_mean,baseline_mean,teacher_advantage_mean,"
    "teacher_positive_advantage_rate}",
    "suffix_sft": "prefix_suffix_sft/{sampled_entries,train_eligible_entries,ready_trees,ready_nodes,balanced_ready_nodes,"
    "max_nodes_per_tree_per_step,train_chunk_size,partial_batch_enabled,partial_batch_entries,waiting_for_full_batch,"
    "needed_for_next_batch,pending_trees,pending_nodes,schedule_epoch_local,recorded_entries,matured_entries,"
    "teacher_tail_filtered,non_sft_teacher_filtered,stale_teacher_filtered,record_skipped_entries,"
    "record_skipped_optimizer_steps}",
    "epoch_sft": "epoch_suffix_sft/{enabled,epoch,epoch_start_step,epoch_end_step,passes,train_chunk_size,snapshot_nodes,"
    "snapshot_trees,trees_cleaned_after_clear,events_cleared,events_cleared_pending,events_cleared_in_flight,sample_batches,"
    "sampled_entries,dropped_entries,optimizer_steps,recorded_entries,record_skipped_entries,record_skipped_optimizer_steps,"
    "stale_entries,actor_optimizer_steps,actor_lr_scheduler_steps,actor_post_sft_optimizer_steps,waiting_for_full_batch,"
    "needed_for_next_batch} timing_s/{epoch_suffix_sft_old_log_prob,epoch_suffix_sft_ref,epoch_suffix_sft_update_actor}",
    # Pools
    "injection": "synthetic_inject/{injected_count,rollout_n,failed_collected,failure_feed_skipped} "
    "timing_s/one_stage/{synthetic_wall,synthetic_count}",
    "forest": "forest/{num_trees,num_nodes,active_nodes,active_nonroot_nodes,teacher_suffix_nodes,deactivated_nodes} "
    "teacher/{events_queued,events_in_flight,events_dispatched,events_succeeded,events_duplicate_dropped,events_invalid,"
    "events_stale_parent_inactive,events_failed,events_stale,events_cleared} "
    "sft/{eligible_trees,eligible_nodes,sampled_nodes,recorded_node_updates,optimizer_steps} "
    "prefix_any_success_rate root_any_success_rate "
    "forest_pool/{trees,num_trees,active_trees,active_nodes,total_nodes,observed_root_nodes,observed_nonroot_nodes,"
    "pending_events,suffix_sft_nodes,suffix_sft_candidate_nodes,suffix_sft_updates_total,suffix_sft_sampled_cumulative,"
    "rollout_retired_nodes,events_enqueued,events_dispatched,teacher_successes,teacher_failed,teacher_stale,teacher_cleared,"
    "duplicate_child,invalid_child,trees_cleaned_pre_sample} "
    "forest_pool/{observations_recorded,events_added,nodes_retired,root_groups_seen,root_fail_groups,root_success_groups,"
    "root_events_added,root_trees_created,root_nodes_deactivated,trees_cleaned}_this_step",
    "chain": "chain_pool/{size,learning,deepening,completed,abandoned,total_nodes,avg_chain_len,max_chain_len,avg_depth,"
    "max_depth,avg_aug_prompt_len,max_aug_prompt_len,retreats,masters,completed_cumulative,abandoned_cumulative,"
    "deepening_requests,teacher_successes,teacher_invalid_depth,teacher_invalid_prefix,teacher_invalid_length} "
    "chain_pool/{observations_recorded,main_failures_seen,main_failures_enqueued}_this_step",
    "flat": "synthetic_inject/{recorded_entries,failed_gated_to_teacher} synthetic_pool/{size,unique_prompts}",
    "flat_states": "synthetic_inject/escape_rate_groups synthetic_pool/{avg_p_hat_tried,avg_aug_prompt_len,"
    "max_aug_prompt_len,min_aug_prompt_len}",
    "failures": "failed_pool/{size,unique_keys,max_deque_depth}",
    "branches": of_stream("branch_chain") + f" branch_seqlen/{SEQLEN} actor/branch_chain/{STREAM}",
    "inline": "timing_s/agent_loop/generate_branch_chain/{min,max,mean}",
    "buffer": "buffer/{size,unique_trees,unique_steps,avg_position_ratio,entries_sampled,new_points_collected} "
    "timing_s/one_stage/{buffer_branch_wall,buffer_branch_count}",
    "suffixes": "teacher/{entries_sampled,failed_collected} teacher_pool/size",
    "teacher": "{teacher_worker,teacher_suffix}/{total_attempted,total_succeeded,success_rate,step_attempted,step_succeeded}",
    # Diagnostics
    "paired": "prefix_paired_eval/{pairs,requested_pairs,filtered_rollouts,root_response_success_rate,"
    "prefix_response_success_rate,prefix_minus_root_response_success,root_any_success_rate,prefix_any_success_rate,"
    "prefix_minus_root_any_success,prefix_better_frac,root_better_frac,equal_frac,any_prefix_only_frac,any_root_only_frac,"
    "any_both_success_frac,any_both_fail_frac,prefix_depth_edges_mean,prefix_depth_tokens_mean,prefix_depth_ge2_frac,"
    "prefix_has_descendant_frac}",
    "paired_buckets": f"prefix_paired_eval/{{root_zero,root_at_most_one_success,root_nonzero,depth1,depth_ge2}}_{BUCKET}",
    "debug_dump": "prefix_debug_dump/{records,deeper_records}",
    "recoverability": "timing_s/recoverability_eval",
}


def names(*groups: str) -> list[str]:
    return [name for group in groups for part in GROUPS[group].split() for name in expand(part)]


def missing(records: Iterable[Mapping[str, float]], *groups: str) -> list[str]:
    """The names of some groups that are in none of a run's records."""
    emitted = {name for record in records for name in record}
    return [name for name in names(*groups) if name not in emitted]
