"""The process beside a node's ranks, which looks at them and talks to the other nodes' sidecars; without torch."""
