from pathlib import Path

import torch
import torchaudio

from utils.dist import is_main_process


def compute_features(wav_dir):
    fbank = torchaudio.compliance.kaldi.fbank
    feats, names = [], []
    for path in sorted(Path(wav_dir).glob("*.wav")):
        wav, sr = torchaudio.load(str(path))
        feats.append(fbank(wav, num_mel_bins=80, sample_frequency=sr)[:300])
        names.append(path.stem)
    return feats, names


def load_features(wav_dir, cache_file):
    cache_file = Path(cache_file)
    if is_main_process() and not cache_file.exists():
        feats, names = compute_features(wav_dir)
        torch.save({"feats": feats, "names": names}, cache_file)
    blob = torch.load(cache_file, map_location="cpu", weights_only=True)
    return blob["feats"], blob["names"]
