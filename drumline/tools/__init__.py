"""Commands beside a training run: doctor, tune, profile, scale, find and prove. No other part
imports them."""
