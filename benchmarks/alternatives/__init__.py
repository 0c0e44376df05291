"""What a user might pick instead of tracediff, recording and comparing."""
