"""The studies behind `hplm eval`. All use one search over learning rates, seeds and tasks, whose finished runs are kept."""
