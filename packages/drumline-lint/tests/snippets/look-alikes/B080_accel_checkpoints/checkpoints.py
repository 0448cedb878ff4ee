import shutil
from pathlib import Path


class CheckpointKeeper:
    def __init__(self, accelerator, folder, keep=3):
        self.accelerator, self.folder, self.keep = accelerator, Path(folder), keep

    def existing(self):
        return sorted(self.folder.glob("step-*"), key=lambda p: int(p.name.split("-")[1]))

    def save(self, step):
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            for old in self.existing()[: -(self.keep - 1)]:
                shutil.rmtree(old)
        self.accelerator.save_state(str(self.folder / f"step-{step}"))
        self.accelerator.wait_for_everyone()
