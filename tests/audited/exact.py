"""A job that hands over all that it draws from."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import easyckpt

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
noise = torch.Generator().manual_seed(7)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "noise": noise}

with easyckpt.Checkpointer(sys.argv[1], state, save_storage_interval=10) as checkpointer:
    step = checkpointer.load().step
    for epoch in range(step // 8, 100):
        for x, y in checkpointer.batches(DataLoader(data, 8, shuffle=True), epoch):
            loss = (model(x + 0.01 * torch.randn(x.shape, generator=noise)) - y).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            checkpointer.log(loss=loss)
            checkpointer.save_if_needed(step)
