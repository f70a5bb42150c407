"""The commands `hplm place`: which bases run on which devices, and whether the prediction was right."""
