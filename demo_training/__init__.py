"""How the demo checkpoint is made: data, tokenizer, tasks, training, export and evaluation."""
