"""Map flags of TRL, Trainer, Axolotl, Unsloth, LLaMA-Factory and torchtune to the flags here.

flags.py asks it about flags that it does not know.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from fnmatch import fnmatchcase

# An answer, and below it the names or patterns that get it. The first match counts.
FOREIGN_FLAGS = """
use --model, a Hub id or a directory; the model's own tokenizer is used
    model_name_or_path model_name base_model pretrained_model_name_or_path model_id checkpointer
    base_model_config tokenizer tokenizer_name tokenizer_config tokenizer_type

use --dataset: files, directories or a Hub id
    dataset_name datasets dataset_path dataset_dir train_file train_dataset data_path data_files
    dataset_id

write it behind the Hub id: --dataset OWNER/NAME,name=..,split=..,revision=..
    dataset_config dataset_config_name dataset_subset dataset_train_split dataset_split split
    dataset_revision

use --eval_dataset: files, a Hub id, or a fraction of the examples, such as 0.02
    test_datasets val_set_size val_size eval_size eval_split dataset_test_split validation_file
    dataset_val eval_file validation_split*

use --max_seq_len
    max_length max_seq_length sequence_len cutoff_len model_max_length max_prompt_length
    max_completion_length max_target_length context_length sequence_length

not supported; longer rows are truncated at their end
    truncation_mode truncation_side excess_length_strategy

use --chat_template FILE; without it the model's own template is used
    chat_template_path chat_template_jinja template

write it into the examples, under the key chat_template_kwargs
    enable_thinking chat_template_kwargs reasoning_effort

not needed, because an example's keys say what it is; --columns OLD=NEW renames keys
    dataset_text_field text_column field_messages input_column output_column message_property*
    roles columns_mapping formatting*

not needed, because only answers are trained; to train whole texts, use examples with the key text
    train_on_inputs train_on_prompt train_on_input train_on_responses_only completion_only_loss
    assistant_only_loss mask_history mask_prompt response_template instruction_template

not needed, because rows are always packed, and no row sees another
    packing sample_packing packed neat_packing padding_free pad_to_sequence_len group_by_length
    pad_to_multiple_of train_sampling_strategy length_column_name eval_packing
    eval_sample_packing packing_strategy multipack* sample_pack*

not needed, because all cores encode the data set once, into a cache
    dataset_num_proc preprocessing_num_workers dataset_processes dataloader_* dataset_kwargs
    dataset_batch_size dataset_prepared_path overwrite_cache tokenized_path streaming
    dataset_streaming remove_unused_columns dataset_exact_deduplication skip_prepare_dataset
    ignore_data_skip push_dataset_to_hub preprocessing_batch_size buffer_size loading_workers

not supported; use a smaller file, or --max_steps
    max_samples max_train_samples dataset_samples

not supported; use a smaller --eval_dataset: a file, or a fraction of the examples such as 0.02
    max_eval_samples

not needed, because every epoch is shuffled anew, by --seed
    shuffle shuffle_dataset shuffle_merged_datasets data_seed random_state full_determinism

not supported; --dataset takes several files and reads all of them
    interleave_probs mix_strategy dataset_mixer

use --trainable_tokens, which adds the tokens that the vocabulary lacks
    tokens add_tokens new_special_tokens resize_token* resize_vocab trainable_token_indices

not supported; the model's own tokenizer is used as it is
    special_tokens added_tokens* eos_token pad_token bos_token fix_tokenizer *_special_tokens
    new_special_tokens_config

not supported; the model's config.json decides, and no remote code is run
    trust_remote_code model_revision model_init_kwargs model_type is_*_derived_model
    use_fast_tokenizer tokenizer_use_fast rope_scaling overrides_of_model_config revision

use --batch_size, the rows of a step over all GPUs; the plan decides what a GPU takes at once
    per_device_train_batch_size per_gpu_train_batch_size micro_batch_size train_batch_size
    gradient_accumulation_steps auto_find_batch_size global_batch_size

not needed, because an evaluation takes as many tokens at once as training does
    per_device_eval_batch_size eval_batch_size eval_accumulation_steps batch_eval_metrics
    eval_do_concat_batches eval_use_gather_object

use --num_epochs
    num_train_epochs epochs train_epochs max_epochs epoch

use --max_steps
    max_steps_per_epoch total_steps train_steps iters training_steps

use --learning_rate
    lr learning_rates

use --lr_schedule: cosine, linear or constant
    lr_scheduler lr_scheduler_type scheduler

not supported; --lr_schedule cosine and linear end at 0
    lr_scheduler_kwargs cosine_min_lr_ratio cosine_constant_lr_ratio num_warmup_steps_of_cosine

use --warmup_fraction, a fraction of all steps
    warmup_ratio warmup_steps num_warmup_steps

use --max_grad_norm
    clip_grad_norm grad_clip gradient_clipping max_gradient_norm grad_norm apply_gradient_clipping

use --weight_decay
    wd

not needed, because the optimizer is always AdamW with 8-bit, paged state and betas of 0.9 and 0.999
    optim optimizer optim_args optim_target_modules adam_beta1 adam_beta2 adam_epsilon
    adam_beta3 optimizer_in_bwd optimizer_cls

not needed, because the loss is the mean over a step's trained tokens on all GPUs
    average_tokens_across_devices num_items_in_batch

not needed, because MoE routers stay frozen
    router_aux_loss_coef moe_aux_loss_coef

not supported
    neftune* noisy_embedding_alpha relora* use_galore galore_* use_badam badam_*
    use_apollo apollo_* use_adam_mini loraplus* use_dft* lisa_* optim_loraplus* oft_*
    mixture_of_depths train_from_scratch

use --lora_rank
    lora_r r lora_dim max_lora_rank

use --target_modules: names such as q_proj v_proj, or all-linear, or experts
    lora_target_modules lora_target lora_attn_modules lora_target_parameters

not needed, because --target_modules all-linear is the default
    lora_target_linear apply_lora_to_mlp

use --adapter rslora
    use_rslora peft_use_rslora

use --adapter dora
    use_dora peft_use_dora

use --init_adapter
    lora_model_dir adapter_name_or_path lora_path peft_model_id adapter_path adapter_folder

not supported; only adapters of linears are trained
    lora_modules_to_save modules_to_save additional_target apply_lora_to_output lora_bias bias
    unfrozen_parameters peft_layers_to_transform layers_to_transform lora_layers_to_transform
    embedding_lr freeze_*

not supported; an adapter begins as PEFT's default does, or as --init_adapter
    pissa_init pissa_* loftq_config init_lora_weights peft_init_lora_weights use_llama_pro

not needed, because LoRA on a 4-bit model is all that is trained
    use_peft use_lora lora finetuning_type train_type lora_task_type lora_fan_in_fan_out
    create_new_adapter full_finetuning

not needed, because the base is always in NF4, with double quantization
    load_in_4bit load_in_8bit quantization_bit quantization_method quantize_base bnb_*
    use_bnb_nested_quant double_quantization quantization quant_method bnb_config_kwargs
    quantization_type gptq* load_in_16bit load_in_fp8 n_bits

not needed, because all is computed in bf16; --compute_dtype float32 is for checks
    bf16 fp16 bfloat16 float16 tf32 pure_bf16 bf16_full_eval fp16_full_eval mixed_precision
    dtype torch_dtype half_precision_backend fp8 precision

not needed, because the free memory decides what is recomputed; --recompute overrides that
    gradient_checkpointing use_gradient_checkpointing gradient_checkpointing_kwargs
    gradient_checkpointing_use_reentrant activation_checkpointing
    activation_checkpointing_kwargs enable_activation_checkpointing
    disable_gradient_checkpointing reentrant_checkpointing use_reentrant_gc

use --offload_activations
    activation_offloading enable_activation_offloading use_activation_cpu_offload

use --offload_params; the optimizer's state is paged anyway
    fsdp_cpu_offload cpu_offload use_cpu_offload offload_param offload_optimizer
    fsdp_offload_params

not needed, because the free memory decides what is sharded; --shard_group_size overrides that
    fsdp fsdp_* deepspeed deepspeed_* ddp ddp_* parallelism_config accelerator_config
    accelerate_config distributed_type sharding_strategy no_sync
    dp_shard_size dp_replicate_size device_map custom_sharded_layers zero_stage auto_wrap_policy

use --context_parallel_size
    sequence_parallel_degree cp_size context_parallel_degree sp_size

not supported; --context_parallel_size divides long rows over GPUs
    tensor_parallel_* pipeline_* expert_parallel_size tp_size

not needed, because the fastest kernel is used; --attn overrides that
    attn_implementation flash_attention flash_attention_2 flash_attn sdp_attention
    eager_attention xformers_attention flex_attention use_flash_attention* s2_attention
    shift_attn use_reentrant_attention attention attention_backend attention_implementation
    attn_impl attn_type

not needed, because this script's own kernels are always used
    use_liger* liger_* enable_liger_kernel use_unsloth* plugins lora_mlp_kernel lora_qkv_kernel
    lora_o_kernel cut_cross_entropy unsloth_* chunked_cross_entropy use_kernels

not needed, because what gains by compiling is always compiled
    torch_compile torch_compile_* compile compile_*

not needed, because there is a GPU for each process that torchrun starts, else the CPU
    device use_cpu no_cuda local_rank cuda_* device_type use_mps_device

not needed, because torchrun starts the processes: its nproc_per_node stands before the script
    nproc_per_node nnodes num_nodes node_rank num_processes num_machines machine_rank num_gpus
    n_gpu n_gpus gpus gpu_ids devices world_size master_addr master_port main_process_* rdzv_*

use --memory_limit_gib
    max_memory gpu_memory_limit gpu_memory_utilization

not needed
    torch_empty_cache_steps use_cache skip_memory_metrics low_cpu_mem_usage
    enable_jit_checkpoint fast_inference debug strict profiler profiler_* low_memory upcast_*
    use_kv_cache verbose

not needed; the Hub's own settings count: HF_HOME, `hf auth login`
    cache_dir hf_token hf_hub_token use_auth_token token

use --eval_every, a number of steps; the start and the end are always evaluated
    eval_steps evals_per_epoch eval_strategy evaluation_strategy eval_delay eval_on_start
    run_val_every_n_steps eval_interval

use --eval_samples
    generate_during_eval eval_table_size num_eval_samples

use --save_every: minutes such as 5m, or a number of steps such as 100
    save_steps saves_per_epoch save_strategy save_every_n_steps checkpoint_every save_interval
    save_model save_model_every*

use --keep_checkpoints
    save_total_limit max_checkpoints keep_last_n

not needed, because the same command resumes a run; --resume never begins a new one
    resume_from_checkpoint auto_resume_from_checkpoints overwrite_output_dir resume_training
    resume_from

not needed, because the checkpoint of the best evaluation is kept, and the log names it at the end
    load_best_model_at_end metric_for_best_model greater_is_better early_stopping_*

not needed, because adapters are safetensors, and a checkpoint resumes on any number of GPUs
    save_safetensors save_only_model save_on_each_node save_adapter_weights_only save_first_step
    restore_callback_states_from_checkpoint

use --report_to: tensorboard, wandb or none; loss.png is drawn anyway
    report_to_* metric_logger use_tensorboard use_wandb tensorboard* wandb_* wandb mlflow_*
    comet_* use_comet use_mlflow swanlab_* use_swanlab trackio_* run_name project project_name
    entity logging_dir plot_loss

not needed, because metrics.jsonl has every step, and the log has a line every 2 seconds
    logging_* log_level* log_every_n_steps log_* log_on_each_node disable_tqdm
    include_num_input_tokens_seen include_for_metrics include_tokens_per_second
    log_peak_memory_stats label_names prediction_loss_only

not needed, because the script always trains, and evaluates if there is an --eval_dataset
    do_train do_eval do_predict stage predict_with_generate

not supported; merge_adapters.py writes a model for `hf upload` and llama.cpp's converter
    push_to_hub hub_* export_* save_gguf save_method save_merged* merge_lora*

use --output_dir
    output_directory logdir out_dir

use --max_minutes
    timeout max_time

use --loss: dpo, ipo, simpo, orpo or kto
    rl loss_type pref_loss rlhf_type

use --beta
    rl_beta pref_beta dpo_beta orpo_alpha orpo_beta kto_beta simpo_beta

use --label_smoothing, with --loss dpo
    dpo_label_smoothing label_smoothing_factor

use --simpo_gamma
    gamma gamma_beta_ratio cpo_simpo_gamma

use --desirable_weight
    kto_desirable_weight kto_chosen_weight

use --undesirable_weight
    kto_undesirable_weight kto_rejected_weight

not needed, because the reference is the model before the first step, computed once
    ref_model ref_model_* reference_* precompute_ref_* ref_adapter_name
    model_adapter_name force_use_ref_model sync_ref_model disable_dropout

not supported; --loss simpo adds no cross-entropy, as TRL with cpo_alpha 0
    cpo_alpha

not supported
    pref_ftx rpo_alpha f_*divergence* ld_alpha loss_weights use_weighting discopop_tau
    pref_bco_weight

not supported; use TRL for reinforcement learning
    reward_* reward_model num_generations vllm_* use_vllm grpo_* ppo_* temperature top_p

not supported; only text is trained
    image_* video_* processor_type vision_* max_pixels min_pixels
"""


# {flag: {another tool's value: this project's}}
VALUES = {
    "adapter": {"qlora": "lora", "qdora": "dora", "peft": "lora"},
    "attn": {"fa2": "flash_attention_2", "flash_attn": "flash_attention_2", "eager": "sdpa"},
    "compute_dtype": {"bf16": "bfloat16", "fp32": "float32", "f32": "float32"},
    "loss": {"sigmoid": "dpo", "kto_pair": "kto", "nll": "sft", "cross_entropy": "sft"},
    "recompute": {"full": "all", "true": "all", "on": "all", "false": "none", "off": "none"},
    "report_to": {"tb": "tensorboard"},
    "resume": {"true": "must", "yes": "must", "false": "never", "no": "never"}}


@functools.cache
def read_foreign_flags() -> list[tuple[str, str]]:
    """Return [(name or pattern, answer)] of FOREIGN_FLAGS."""
    entries = (entry.partition("\n") for entry in FOREIGN_FLAGS.strip().split("\n\n"))
    return [(name, answer) for answer, _, names in entries for name in names.split()]


def flag_hint(name: str) -> str:
    """Return what to do instead of using another tool's flag of this name; "" for an unknown name.
    """
    word = name.lstrip("-").replace("-", "_").lower()
    hints = read_foreign_flags()
    return next((hint for theirs, hint in hints if fnmatchcase(word, theirs)), "")


def value_hint(flag: str, text: str, values: Sequence[str]) -> str:
    """Return the value of a flag that is meant by another tool's word for it, a part of it, or a
    misspelling; "" if none is."""
    word = text.lower()
    if meant := VALUES.get(flag, {}).get(word):
        return meant
    parts = [value for value in values if value.startswith(word) or word.startswith(value)]
    return (parts or difflib.get_close_matches(word, values, 1, cutoff=0.8) or [""])[0]
