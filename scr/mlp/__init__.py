"""Study 2: from nn.Linear to a fused MLP. Cases, predictions, profiles, kernels and sentences of its own."""
