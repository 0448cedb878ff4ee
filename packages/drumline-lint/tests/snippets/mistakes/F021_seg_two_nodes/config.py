DATA = "/nfs/data/potsdam/tiles"
RUNS = "runs/deeplabv3"
CLASSES = 6
EPOCHS = 80
BATCH_PER_GPU = 8
LR = 0.01
