"""Driver and patches of the Hugging Face Trainer and of the trainers derived from it."""
