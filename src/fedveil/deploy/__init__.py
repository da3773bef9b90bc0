"""What it takes to run FedVeil on Flower: app folders, client homes, certificates, and a cluster on one machine."""
