"""The Hugging Face Trainer and its family."""
