"""From an AWS account to a training cluster, and back to nothing: one CloudFormation stack per
cluster."""
